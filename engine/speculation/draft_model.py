"""Guesses of a second, smaller model with the same tokens.

It guesses by sampling from its own logits with the random numbers that the model will sample with: same seed, same position,
same parameters, penalties and grammar. Random numbers that are shared so make both models choose the same token nearly as often
as any method could (Gumbel coupling: Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative
decoding"), and what is generated does not depend on the draft model at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Part, ragged_batch
from engine.request import Sequence
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from engine.speculation.draft_cache import DraftCache, Held
from engine.speculation.drafts import Ask, Drafter
from engine.speculation.worth import Worth
from grammar.compiler import allocate_bitmask


@dataclass(slots=True)
class _Guess:
    """One in the making. `next`: what has to be computed before the next token can be chosen, from `held.computed` on."""

    ask: Ask
    held: Held
    next: npt.NDArray[np.uint32]
    state: SamplingState
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0  # by the grammar, to be taken back


class DraftModel(Drafter):
    """See the module. One pass a token for all sequences that are drafted for; before the first, a pass over what the model has
    not seen of them, of a step's tokens at most: until it has caught up with a sequence it guesses nothing for it."""

    name = "model"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        draft_vocab_size: int,
        max_position: int,
        max_tokens: int,
        max_step_tokens: int,
        worth: Callable[[], Worth] | None = Worth,
    ) -> None:
        """runner: over KV memory of `num_blocks` blocks. sampler, vocab_size: of the model that is drafted for.
        draft_vocab_size: of this one, whose head may be padded otherwise. max_position: as far as this one goes. max_tokens:
        guessed at once. worth: says for each number of running sequences whether drafting pays; None: always."""
        self.cache = DraftCache(num_blocks, block_size)
        self.longest = max_tokens
        self.seconds = 0.0
        """What drafting has taken so far."""
        self._runner = runner
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._max_position = max_position
        self._max_step_tokens = max_step_tokens
        self._make_worth = worth
        self._worth: dict[int, Worth] = {}
        self._asked = self._drafted = False  # in the step that is under way

    def warm_up(self) -> None:
        """A pass that leaves no trace, before the first request."""
        part = Part(np.zeros(1, dtype=np.uint32), 0, np.zeros(1, dtype=np.int32))
        self._runner.run(ragged_batch([part], self.cache.pool.block_size, self._runner.device), [0])

    def draft(self, asks: SequenceOf[Ask], running: int) -> list[list[int]]:
        began = time.perf_counter()
        guesses: dict[int, _Guess] = {}
        self._asked = True
        if self._pays(running):
            self._drafted = True
            room = self._max_step_tokens
            for index, ask in enumerate(asks):
                guess = self._begin(ask, room)
                if guess is not None:
                    guesses[index] = guess
                    room -= len(guess.next)
            self._run(list(guesses.values()))
        self.seconds += time.perf_counter() - began
        return [guesses[index].tokens if index in guesses else [] for index in range(len(asks))]

    def stepped(self, seconds: float, tokens: int, running: int) -> None:
        if self._asked and self._make_worth is not None:
            self._worth.setdefault(running, self._make_worth()).stepped(seconds, tokens, drafted=self._drafted)
        self._asked = self._drafted = False

    def forget_idle(self) -> None:
        self.cache.forget_idle()

    def check_integrity(self) -> None:
        self.cache.check_integrity()

    def _pays(self, running: int) -> bool:
        if self._make_worth is None:
            return True
        return self._worth.setdefault(running, self._make_worth()).wants()

    def _begin(self, ask: Ask, room: int) -> _Guess | None:
        """None where there is no room for the sequence, in this step or in the memory."""
        sequence, after = ask.sequence, ask.after
        total = sequence.num_tokens + len(after)
        if room < 1 or total + ask.limit > self._max_position:
            return None
        held = self.cache.hold(sequence)
        until = min(sequence.num_tokens, held.computed + room)
        tokens = sequence.tokens(held.computed, until)
        if until == sequence.num_tokens and len(tokens) + len(after) <= room:
            tokens = np.concatenate((tokens, np.asarray(after, dtype=np.uint32)))
        if int(tokens.max()) >= self._draft_vocab_size:
            return None  # padding of the wider head, which no text is made of
        # The last token that is guessed is not computed.
        if not self.cache.reserve(held, max(until, total + ask.limit - 1)):
            return None
        held.known = sequence.num_tokens
        return _Guess(ask, held, tokens, _without_logprobs(sequence, after))

    def _run(self, guesses: list[_Guess]) -> None:
        """Computes what is to be computed, and guesses for those that have caught up, all of them together."""
        try:
            while guesses:
                logits = self._compute(guesses)
                drafting = [(row, one) for row, one in enumerate(guesses) if one.held.computed >= _total(one)]
                guesses = self._choose(logits, drafting) if drafting else []
        finally:
            for one in guesses:
                _take_back(one)

    def _compute(self, guesses: SequenceOf[_Guess]) -> torch.Tensor:
        """Logits behind the last token of each."""
        parts = [Part(one.next, one.held.computed, one.held.table.array) for one in guesses]
        batch = ragged_batch(parts, self.cache.pool.block_size, self._runner.device)
        logits = self._runner.run(batch, [end - 1 for end in batch.query_start_list[1:]])
        for one in guesses:
            held = one.held
            beyond = max(held.computed, held.known)
            held.computed += len(one.next)
            if held.computed > beyond:
                held.guessed += one.next[len(one.next) - (held.computed - beyond) :].tolist()
            self.cache.publish(held)
        return logits

    def _choose(self, logits: torch.Tensor, drafting: SequenceOf[tuple[int, _Guess]]) -> list[_Guess]:
        """Guesses one more token for each; who goes on."""
        logits = _as_wide(logits[[row for row, _ in drafting]], self._vocab_size)
        bitmask = None
        if any(one.ask.sequence.matcher is not None for _, one in drafting):
            bitmask = allocate_bitmask(len(drafting), self._vocab_size)
            for row, (_, one) in enumerate(drafting):
                _fill(one, bitmask, row)
        going_on = []
        for (_, one), sampled in zip(
            drafting, self._sampler.sample(logits, [one.state for _, one in drafting], bitmask), strict=True
        ):
            if sampled.error is None and _accepts(one, sampled.token_id):
                one.tokens.append(sampled.token_id)
                one.state.append(sampled.token_id)
                one.next = np.asarray([sampled.token_id], dtype=np.uint32)
                if len(one.tokens) < one.ask.limit and sampled.token_id not in one.state.end_ids:
                    going_on.append(one)
                    continue
            _take_back(one)
        return going_on


def _total(one: _Guess) -> int:
    """Tokens that must be computed before the next one can be chosen."""
    return one.ask.sequence.num_tokens + len(one.ask.after) + len(one.tokens)


def _without_logprobs(sequence: Sequence, after: SequenceOf[int]) -> SamplingState:
    state = sequence.sampling.ahead(after)
    if state.params.logprobs is not None:
        state.params = msgspec.structs.replace(state.params, logprobs=None)
    return state


def _as_wide(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Of heads that are padded to different sizes the tokens are the same."""
    if logits.shape[1] >= width:
        return logits[:, :width].contiguous()
    return torch.nn.functional.pad(logits, (0, width - logits.shape[1]), value=-torch.inf)


def _fill(one: _Guess, bitmask: torch.Tensor, row: int) -> None:
    matcher = one.ask.sequence.matcher
    if matcher is None:
        return
    while one.accepted < len(one.ask.after):
        if not matcher.accept(one.ask.after[one.accepted]):
            raise RuntimeError("what a grammar forces is not allowed by it; this is a bug")
        one.accepted += 1
    matcher.fill_bitmask(bitmask, row)


def _accepts(one: _Guess, token_id: int) -> bool:
    matcher = one.ask.sequence.matcher
    if matcher is None:
        return True
    if not matcher.accept(token_id):
        return False
    one.accepted += 1
    return True


def _take_back(one: _Guess) -> None:
    matcher = one.ask.sequence.matcher
    if matcher is not None and one.accepted:
        matcher.rollback(one.accepted)
        one.accepted = 0
