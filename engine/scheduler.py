"""Which sequences compute how many tokens in the next step.

Continuous batching under one token budget a step. Running sequences come first: those that decode (one token each), then those
whose prefill is spread over steps, each kind in order of rank. What is left of the budget admits waiting sequences in order of
rank; the first that does not fit ends admission, so that nobody is overtaken for ever.

When blocks run out, running sequences of the lowest rank are preempted: their blocks are freed and they go back to the
queue with the tokens they have, to be recomputed (from what the prefix cache still holds). A sequence that would have to
preempt itself waits a step with its blocks instead. So the one of the highest rank always goes on, which rules out livelock:
alone it fits, because a request that cannot fit alone is refused. A step that preempted, or kept a running sequence waiting,
admits nobody.

A sequence of which a tier has blocks that the pool has not is given room as if it were admitted, and loads them first; it does
not run meanwhile, and nobody waits for it but who would need its blocks. Loads end by themselves, so none of this can last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.kv_cache import BlockCopy, KVCache
from engine.offloading import Offloading
from engine.request import Request, Sequence, Status
from engine.speculation.drafts import Draft
from engine.speculation.speculator import Speculator

_LOOKED_AT = 4
"""Sequences at the head of the queue that are looked at for something to load."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The next `count` tokens of a sequence, from position `start` on; `copies` come before. `samples`: they are the last of
    the known ones, so a new token is chosen. `draft`: tokens behind them that may come next, which `count` includes. `decodes`:
    they were generated just now."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    copies: tuple[BlockCopy, ...] = ()
    draft: Draft | None = None
    decodes: bool = True

    @property
    def is_prefill(self) -> bool:
        """True unless it only computes what was generated last, and guesses behind it."""
        return not self.decodes or self.start < self.sequence.request.prompt_tokens

    @property
    def known(self) -> int:
        """Tokens of `count` that are no guesses."""
        return self.count - (0 if self.draft is None else len(self.draft.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what is computed, which requests left the queue for the first time, and how many sequences were preempted."""

    scheduled: tuple[ScheduledSequence, ...]
    started: tuple[Request, ...]
    preempted: int


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    rows: int
    scheduled: dict[int, ScheduledSequence] = field(default_factory=dict)  # by id(sequence)
    preempted: int = 0
    stalled: bool = False


def _rank(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.rank


class Scheduler:
    """The queue and the running set, both in order of rank."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tiers: Offloading | None = None,
        give_way: Callable[[int], bool] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """tiers, speculator: None where there are none. give_way: tries to free so many blocks that nobody waits for; True when
        that gave any."""
        self._cache = cache
        self._speculator = speculator
        self._tiers = tiers
        self._give_way = give_way
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.waiting_tokens = 0

    def has_work(self) -> bool:
        """True when `schedule` has something to choose from."""
        return bool(self.running or self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence that holds no blocks into the queue, where its rank belongs."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_rank)
        self.waiting_tokens += sequence.num_tokens

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue that was never run."""
        self._dequeue(sequence)
        sequence.status = Status.UNFORKED

    def adopt(self, sequence: Sequence) -> None:
        """Adds a sequence that was forked off a running one; its slot was counted with its trunk."""
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back."""
        if sequence.status is Status.RUNNING:
            self._remove(self.running, sequence)
            self._cache.release(sequence)
        elif sequence.status is Status.WAITING:
            self._dequeue(sequence)
        elif sequence.status is Status.LOADING and self._tiers is not None:
            self._tiers.cancel(sequence)
            self.loading.remove(sequence)
            self._cache.release(sequence)
        sequence.status = Status.FINISHED

    def schedule(self, now: float) -> StepPlan:
        """Plans a step and reserves its blocks. `now` is when requests that leave the queue do so. A plan without a sequence
        comes only from an empty scheduler, or while blocks are being loaded."""
        draft = _Draft(self._max_num_batched_tokens, self._max_num_seqs)
        started = self._take_arrived(now)
        if self._tiers is not None:
            self._begin_loads(self._tiers)
            # Whoever is being loaded joins between two steps, so that this one should not take much longer than the load.
            draft.budget = self._tiers.tokens_meanwhile(draft.budget)
        for decoding in (True, False):
            for sequence in tuple(self.running):
                if draft.budget > 0 and sequence.status is Status.RUNNING and sequence.decodes == decoding:
                    self._continue(sequence, draft)
        if not (draft.preempted or draft.stalled):
            started.extend(self._admit(draft, now))
        self._guess(draft)
        return StepPlan(_families_together(draft.scheduled.values()), tuple(started), draft.preempted)

    def _continue(self, sequence: Sequence, draft: _Draft) -> None:
        """Schedules a running sequence, preempting others of lower rank as far as it needs their blocks."""
        count = min(sequence.remaining, draft.budget)
        while (copies := self._cache.reserve(sequence, count)) is None:
            if self._finds_room(self._cache.shortfall(sequence, count)):
                continue
            victim = self.running[-1]
            if victim is sequence:
                draft.stalled = True
                return
            undone = draft.scheduled.pop(id(victim), None)
            if undone is not None:
                draft.budget += undone.count
            self._preempt(victim)
            draft.preempted += 1
        self._place(sequence, count, copies, draft)

    def _guess(self, draft: _Draft) -> None:
        """Lets sequences that decode go further than what is known, as far as budget, rows and free blocks reach when everybody
        has what is known."""
        if self._speculator is None:
            return
        draft.rows -= sum(item.sequence.slots for item in draft.scheduled.values() if item.samples)
        decoding = [item for item in draft.scheduled.values() if item.samples and not item.is_prefill]
        sequences = [item.sequence for item in decoding]
        guesses = self._speculator.propose(sequences, len(self.running), min(draft.budget, draft.rows))
        for item, guess in zip(decoding, guesses, strict=True):
            sequence = item.sequence
            if guess is None:
                continue
            count = item.count + len(guess.tokens)
            # Nobody gives a block back for a guess, and those that the others will need next are left to them.
            if self._cache.shortfall(sequence, count) > self._cache.pool.num_available - len(self.running):
                continue
            copies = self._cache.reserve(sequence, count)
            if copies is None:
                continue
            draft.scheduled[id(sequence)] = replace(item, count=count, copies=(*item.copies, *copies), draft=guess)
            draft.budget -= len(guess.tokens)
            draft.rows -= len(guess.tokens)

    def _admit(self, draft: _Draft, now: float) -> list[Request]:
        started: list[Request] = []
        held = (*self.running, *self.loading)
        slots = sum(sequence.slots for sequence in held)
        # Blocks that running sequences still need for the tokens they have, and one for each choice's next ones: whoever is
        # admitted into those is preempted a few steps later.
        promised = slots + sum(self._cache.shortfall(sequence, sequence.remaining) for sequence in held)
        while self.waiting:
            sequence = self.waiting[0]
            if slots + sequence.slots > self._max_num_seqs:
                break
            found = self._cache.match(sequence)
            needed = self._cache.blocks_for(sequence.num_tokens) - len(found)
            pool = self._cache.pool
            if needed + promised > pool.num_available - pool.unreferenced(found):
                if not self._finds_room(needed + promised - pool.num_available + pool.unreferenced(found)):
                    break
                continue
            loads = 0 if self._tiers is None else self._tiers.plan(sequence, len(found), self._cache.count_to_match(sequence))
            if self._tiers is not None and loads:
                self._load(self._tiers, sequence, found, loads)
            elif draft.budget > 0:
                self._dequeue(sequence)
                self._cache.attach(sequence, found)
                self._start(sequence, now, started)
                self._continue(sequence, draft)
            else:
                break  # a load takes none of the step
            slots += sequence.slots
            promised += sequence.slots + self._cache.shortfall(sequence, sequence.remaining)
        return started

    def _begin_loads(self, tiers: Offloading) -> None:
        """Lets those in the queue who have something to load begin with it, before anything is computed: as far as there is
        room beside those who are before them."""
        held = (*self.running, *self.loading)
        slots = sum(sequence.slots for sequence in held)
        promised = slots + sum(self._cache.shortfall(sequence, sequence.remaining) for sequence in held)
        pool = self._cache.pool
        for sequence in self.waiting[:_LOOKED_AT]:
            found = self._cache.match(sequence)
            needed = self._cache.blocks_for(sequence.num_tokens) - len(found) + pool.unreferenced(found)
            slots += sequence.slots
            if slots > self._max_num_seqs or needed + promised > pool.num_available:
                return
            loads = tiers.plan(sequence, len(found), self._cache.count_to_match(sequence))
            if loads:
                needed = sequence.slots + self._load(tiers, sequence, found, loads)
            promised += needed

    def _finds_room(self, blocks: int) -> bool:
        """True when something that nobody waits for has given blocks back, up to `blocks` of them."""
        return self._give_way is not None and self._give_way(blocks)

    def _load(self, tiers: Offloading, sequence: Sequence, found: npt.NDArray[np.intp], count: int) -> int:
        """Lets a sequence from the queue wait in a state of its own for what a tier has behind what was `found`. Returns how
        many blocks it will need when that is here."""
        self._dequeue(sequence)
        self._cache.attach(sequence, found)
        self._cache.begin_load(sequence, count)
        sequence.status = Status.LOADING
        self.loading.append(sequence)
        tiers.begin(sequence, len(found))
        return self._cache.shortfall(sequence, sequence.remaining)

    def _take_arrived(self, now: float) -> list[Request]:
        started: list[Request] = []
        if self._tiers is not None:
            for sequence, count in self._tiers.arrived():
                self.loading.remove(sequence)
                self._cache.end_load(sequence, count)
                self._start(sequence, now, started)
        return started

    def _start(self, sequence: Sequence, now: float, started: list[Request]) -> None:
        self.adopt(sequence)
        request = sequence.request
        if request.started_at is None:
            request.started_at = now
            request.cached_tokens = min(sequence.computed, request.prompt_tokens)
            started.append(request)

    def _place(self, sequence: Sequence, count: int, copies: list[BlockCopy], draft: _Draft) -> None:
        samples = count == sequence.remaining
        item = ScheduledSequence(sequence, sequence.computed, count, samples, tuple(copies), decodes=sequence.decodes)
        draft.scheduled[id(sequence)] = item
        draft.budget -= count

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(self.running, sequence)
        self._cache.release(sequence)
        sequence.request.preemptions += 1
        self.enqueue(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self._remove(self.waiting, sequence)
        self.waiting_tokens -= sequence.num_tokens

    @staticmethod
    def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
        index = bisect_left(ordered, sequence.rank, key=_rank)
        if index == len(ordered) or ordered[index] is not sequence:
            raise RuntimeError(f"choice {sequence.index} of request {sequence.request.request_id!r} is not where it belongs")
        del ordered[index]


def _families_together(items: Iterable[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    """Sequences that decode and begin with the same block stand side by side, so that a kernel may attend to what they share
    once for all of them. Where a sequence stands in its step changes nothing else."""
    items = tuple(items)
    prefills = [item for item in items if item.count > 1]
    return *prefills, *sorted((item for item in items if item.count == 1), key=lambda item: item.sequence.table[0])
