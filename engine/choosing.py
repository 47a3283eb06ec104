"""Which tokens a step chooses, from which rows of its logits, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.in_flight import InFlight
from engine.meter import Meter
from engine.output import StepOutput
from engine.request import MAX_FORCED, Sequence, Status
from engine.sampling.sampler import SampledToken, Sampler
from engine.sampling.state import SamplingState
from engine.scheduler import ScheduledSequence, StepPlan
from engine.speculation.speculator import Draft
from grammar.compiler import allocate_bitmask, only_token

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choosing:
    """A sequence that a token is chosen for. `rows` of the logits: behind its known tokens, and behind each guess."""

    sequence: Sequence
    rows: range
    draft: Draft | None = None

    @property
    def drafted(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.tokens

    def states(self) -> list[SamplingState]:
        """The sampler's memory at each row."""
        state = self.sequence.sampling
        return [state, *(state.ahead(self.drafted[:count]) for count in range(1, len(self.rows)))]


def rows_of(scheduled: Iterable[ScheduledSequence]) -> list[Choosing]:
    """Which sequences tokens are chosen for, and from which rows of the logits. The first token of every choice comes from the
    prompt's last row."""
    wanted: list[Choosing] = []
    at = 0
    for item in scheduled:
        if not item.samples:
            continue
        rows = range(at, at + 1 + item.count - item.known)
        at = rows.stop
        if item.sequence.is_trunk:
            wanted.extend(Choosing(choice, rows) for choice in item.sequence.request.sequences)
        else:
            wanted.append(Choosing(item.sequence, rows, item.draft))
    return wanted


class Chooser:
    """Samples what a step chooses, and takes it in."""

    def __init__(self, sampler: Sampler, in_flight: InFlight, meter: Meter, vocab_size: int) -> None:
        self._sampler = sampler
        self._in_flight = in_flight
        self._meter = meter
        self._vocab_size = vocab_size

    def choose(self, plan: StepPlan, logits: torch.Tensor, output: StepOutput) -> None:
        """Samples, and appends what was sampled. The first token of every choice comes from the prompt's last row."""
        wanted = rows_of(plan.scheduled)
        bitmask, wanted = self._bitmask(wanted, output)
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
        if drafted:
            self._meter.totals.drafted_tokens += len(drafted)
            self._meter.totals.accepted_tokens += came_true
            if sequence.draft_length is not None:
                sequence.draft_length.verified(len(drafted), came_true)
        if sequence.status is Status.RUNNING:
            self._force(sequence, output)

    def _force(self, sequence: Sequence, output: StepOutput) -> None:
        """Appends the tokens that the grammar leaves no choice about. Only logprobs need a pass for what is known anyhow."""
        if sequence.matcher is None or sequence.request.params.logprobs is not None:
            return
        for _ in range(MAX_FORCED):
            mask = allocate_bitmask(1, self._vocab_size)
            try:
                sequence.matcher.fill_bitmask(mask, 0)
            except Exception as error:  # noqa: BLE001 - fails this request alone, when its next token is chosen
                sequence.broken = error
                return
            token_id = only_token(mask[0])
            if token_id is None:
                sequence.next_mask = mask[0]
                return
            self._meter.totals.forced_tokens += 1
            self._in_flight.append(sequence, SampledToken(token_id), output)
            if sequence.status is not Status.RUNNING:
                return

    def _bitmask(self, wanted: list[Choosing], output: StepOutput) -> tuple[torch.Tensor | None, list[Choosing]]:
        """What the grammars allow next, int32 [R, ceil(V / 32)], or None without any. A request whose grammar breaks fails and
        leaves the rows."""
        if all(one.sequence.matcher is None for one in wanted):
            return None, wanted
        bitmask = allocate_bitmask(sum(len(one.rows) for one in wanted), self._vocab_size)
        at = 0
        kept: list[int] = []
        for one in wanted:
            rows = range(at, at + len(one.rows))
            at = rows.stop
            if one.sequence.status is not Status.FINISHED and one.sequence.matcher is not None:
                self._fill(one, bitmask, rows, output)
            if one.sequence.status is not Status.FINISHED:
                kept.extend(rows)
        if len(kept) < at:
            bitmask = bitmask[kept]
        return bitmask, [one for one in wanted if one.sequence.status is not Status.FINISHED]

    def _fill(self, one: Choosing, bitmask: torch.Tensor, rows: range, output: StepOutput) -> None:
        sequence = one.sequence
        if sequence.broken is None and one.draft is not None and one.draft.masks is not None:
            bitmask[rows.start : rows.stop] = one.draft.masks
        elif sequence.next_mask is not None:
            bitmask[rows.start] = sequence.next_mask
        elif sequence.matcher is not None:
            try:
                if sequence.broken is not None:
                    raise sequence.broken
                sequence.matcher.fill_bitmask(bitmask, rows.start)
            except Exception as error:
                logger.exception("request %s: its grammar failed", sequence.request.request_id)
                message = f"The grammar failed: {error or type(error).__name__}"
                self._in_flight.fail(sequence.request, "grammar_error", message, output)
