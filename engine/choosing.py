"""Which tokens a step chooses, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from engine.choosing_rows import Choosing, rows_of
from engine.in_flight import InFlight
from engine.masks import StepMasks
from engine.meter import Meter
from engine.output import StepOutput
from engine.request import MAX_FORCED, Sequence, Status
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduler import StepPlan
from engine.speculation.speculator import Speculator

logger = logging.getLogger(__name__)


class Chooser:
    """Samples what a step chooses, and takes it in."""

    def __init__(self, sampler: Sampler, masks: StepMasks, in_flight: InFlight, speculator: Speculator, meter: Meter) -> None:
        self._sampler = sampler
        self._speculator = speculator
        self._masks = masks
        self._in_flight = in_flight
        self._meter = meter
        self._wanted: list[Choosing] = []

    def begin(self, plan: StepPlan) -> None:
        """Just before the plan's pass. `choose` or `give_up` must follow."""
        self._wanted = rows_of(plan.scheduled)
        self._masks.begin(self._wanted)

    def give_up(self) -> None:
        """The pass has not come to its end: nothing is chosen."""
        self._wanted = []
        self._masks.take()

    def choose(self, logits: torch.Tensor, output: StepOutput) -> None:
        """Samples, and appends what was sampled. The first token of every choice comes from the prompt's last row."""
        wanted, bitmask = self._allowed(output)
        if not wanted:
            return
        rows = [row for one in wanted for row in one.rows]
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        sampled = iter(self._sampler.sample(logits, [state for one in wanted for state in one.states()], bitmask))
        for one in wanted:
            if one.sequence.status is Status.UNFORKED:
                self._in_flight.fork(one.sequence)
        for one in wanted:
            tokens = [next(sampled) for _ in one.rows]
            if one.sequence.status is Status.RUNNING:  # a choice that failed has ended its siblings
                self._take(one, tokens, output)
        self._force((one.sequence for one in wanted), output)

    def _allowed(self, output: StepOutput) -> tuple[list[Choosing], torch.Tensor | None]:
        """Who goes on, and what the grammars allow, int32 [R, ceil(V / 32)], or None without any. A request whose grammar
        breaks fails."""
        wanted, self._wanted = self._wanted, []
        filled = self._masks.take()
        for index, error in filled.broken.items():
            request = wanted[index].sequence.request
            logger.error("request %s: its grammar failed", request.request_id, exc_info=error)
            self._in_flight.fail(request, "grammar_error", f"The grammar failed: {error or type(error).__name__}", output)
        bitmask = filled.bitmask
        if filled.broken and bitmask is not None:
            kept: list[int] = []
            at = 0
            for one in wanted:
                if one.sequence.status is not Status.FINISHED:
                    kept.extend(range(at, at + len(one.rows)))
                at += len(one.rows)
            bitmask = bitmask[kept]
            wanted = [one for one in wanted if one.sequence.status is not Status.FINISHED]
        return wanted, bitmask

    def _take(self, one: Choosing, tokens: list[SampledToken], output: StepOutput) -> None:
        """Appends what was sampled: the guesses that came true, and the first token that was not guessed."""
        sequence, drafted = one.sequence, one.drafted
        came_true = 0
        for guess, token in zip((*drafted, None), tokens, strict=True):
            true = guess is not None and token.error is None and token.token_id == guess
            came_true += true
            self._in_flight.append(sequence, token, output, computed=true)
            if not true or sequence.status is not Status.RUNNING:
                break
        if one.draft is not None:
            sequence.request.drafted_tokens += len(drafted)
            sequence.request.accepted_tokens += came_true
            self._speculator.verified(sequence, one.draft, came_true)

    def _force(self, sequences: Iterable[Sequence], output: StepOutput) -> None:
        """Appends the tokens that grammars leave no choice about. Only logprobs need a pass for what is known anyhow."""
        asked = [one for one in sequences if one.matcher is not None and one.request.params.logprobs is None]
        for _ in range(MAX_FORCED):
            asked = [sequence for sequence in asked if sequence.status is Status.RUNNING]
            if not asked:
                return
            forced = self._masks.ahead(asked)
            for sequence, token_id in zip(asked, forced, strict=True):
                if token_id is not None and sequence.status is Status.RUNNING:
                    self._meter.totals.forced_tokens += 1
                    sequence.request.forced_tokens += 1
                    self._in_flight.append(sequence, SampledToken(token_id), output)
            asked = [sequence for sequence, token_id in zip(asked, forced, strict=True) if token_id is not None]
