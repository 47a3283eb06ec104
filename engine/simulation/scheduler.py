"""Continuous batching over the real block pool, as the real engine does it, with nothing computed.

One token budget a step. Running sequences come first, in order of arrival (or of priority, then arrival); then waiting ones,
as long as their whole prompt fits into the blocks that are left. When a running sequence finds no block, the last in order is
preempted: it gives its blocks back and will be computed again, from what of it is still cached. A step that preempted admits
nobody. Every sequence fits into the pool when it is alone, so the first in order always gets on. One whose prompt goes on in
a tier gets its room and loads first; others run meanwhile.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from engine.simulation.config import SimulationConfig
from engine.simulation.sequences import Sequence
from engine.simulation.tiers import Load, SimulatedTiers
from prefix_cache.block_pool import BlockPool
from prefix_cache.eviction import EvictionPolicy
from prefix_cache.hashing import TOKEN_BYTES


@dataclass(slots=True)
class Work:
    """`count` tokens of a sequence to compute in this step."""

    sequence: Sequence
    count: int


@dataclass(slots=True)
class Batch:
    """One step: what it computes, and what it costs in seconds before scaling."""

    work: list[Work]
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.step_seconds + self.prefill_seconds + self.decode_seconds


def _sort_key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.sort_key


class Scheduler:
    """Who runs, who waits, and who holds which block."""

    def __init__(
        self, config: SimulationConfig, policy: EvictionPolicy | None = None, tiers: SimulatedTiers | None = None
    ) -> None:
        self._config = config
        self._tiers = tiers
        self.pool = BlockPool(config.num_blocks, config.block_size, policy)
        self.loading: list[Load] = []
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0

    def enqueue(self, sequence: Sequence) -> None:
        """It waits for its turn, at its place in the order."""
        bisect.insort(self.waiting, sequence, key=_sort_key)

    def run_beside(self, sequence: Sequence, child: Sequence) -> None:
        """Starts another choice of a request whose prompt has just been computed: it shares the prompt's blocks. Where no
        more sequences may run it waits instead, and will find the full blocks in the cache."""
        if len(self.running) < self._config.max_num_seqs:
            self.pool.touch(sequence.table.array)
            child.table.extend(sequence.table.array)
            child.computed = sequence.computed
            child.published = sequence.published
            bisect.insort(self.running, child, key=_sort_key)
        else:
            self.enqueue(child)

    def drop(self, sequence: Sequence) -> None:
        """It has finished or was aborted: gives its blocks back."""
        sequence.alive = False
        self._release(sequence)
        self.loading = [load for load in self.loading if load.sequence is not sequence]
        for queue in (self.running, self.waiting):
            place = bisect.bisect_left(queue, sequence.sort_key, key=_sort_key)
            if place < len(queue) and queue[place] is sequence:
                del queue[place]

    def plan(self) -> Batch:
        """The next step. Blocks for what it computes are allocated."""
        budget = self._config.max_num_batched_tokens
        work: list[Work] = []
        preempted = False
        place = 0
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            count = min(len(sequence) - sequence.computed, budget)
            while not self._reserve(sequence, count):
                preempted = True
                self._preempt(self.running[-1])
                if not self.running or self.running[-1].sort_key < sequence.sort_key:
                    break  # it was the last one itself
            else:
                work.append(Work(sequence, count))
                budget -= count
            place += 1
        if not preempted:
            self._admit(work, budget)
        return self._batch(work)

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks findable that its computed tokens have filled."""
        full = sequence.computed // self._config.block_size
        first = sequence.published
        if full > first and self._config.prefix_caching:
            held = self.pool.publish(sequence.table.part(first, full), sequence.digests[first:full], sequence.parent(first))
            sequence.table.replace(first, held)
            sequence.published = full
            if self._tiers is not None:
                self._tiers.store(sequence.digests[first:full], first, sequence.request.prepared.session)

    def take_arrived(self, now: float) -> None:
        """Sequences whose blocks are there run from now on; blocks that did not come are given back."""
        for load in [load for load in self.loading if load.ready_at <= now]:
            self.loading.remove(load)
            sequence, first = load.sequence, load.first
            upto = first + (0 if self._tiers is None else self._tiers.end(load))
            self.pool.free(sequence.table.cut(upto))
            held = self.pool.publish(sequence.table.part(first), sequence.digests[first:upto], sequence.parent(first))
            sequence.table.replace(first, held)
            sequence.published = upto
            sequence.computed = upto * self._config.block_size
            bisect.insort(self.running, sequence, key=_sort_key)

    def held(self) -> dict[int, int]:
        """Block -> in how many tables it is, for the integrity check."""
        counts: dict[int, int] = {}
        for sequence in (*self.running, *(load.sequence for load in self.loading)):
            for block in sequence.table.part(0):
                counts[block] = counts.get(block, 0) + 1
        return counts

    def _admit(self, work: list[Work], budget: int) -> None:
        held = (*self.running, *(load.sequence for load in self.loading))
        owed = sum(self._blocks(len(sequence)) - len(sequence.table) for sequence in held)
        while self.waiting and budget > 0 and len(self.running) + len(self.loading) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            total = len(sequence)
            reusable = (total - 1) // self._config.block_size  # the last token is computed in any case: it gives the next one
            found = self.pool.find(sequence.digests[:reusable] if self._config.prefix_caching else ())
            needed = self._blocks(total) - len(found)
            if needed + owed > self.pool.num_available - self.pool.unreferenced(found):
                return
            del self.waiting[0]
            self.pool.touch(found)
            sequence.table.extend(found)
            sequence.published = len(found)
            sequence.computed = len(found) * self._config.block_size
            loads = 0 if self._tiers is None else self._tiers.plan(sequence, len(found), reusable)
            if loads and self._tiers is not None:
                sequence.table.extend(self.pool.allocate(loads))
                self.loading.append(self._tiers.begin(sequence, len(found), loads))
                owed += self._blocks(total) - len(sequence.table)
                continue
            count = min(total - sequence.computed, budget)
            self._reserve(sequence, count)
            owed += self._blocks(total) - len(sequence.table)
            bisect.insort(self.running, sequence, key=_sort_key)
            work.append(Work(sequence, count))
            budget -= count

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, private where they are written. False, and nothing changed, when there are none."""
        first, offset = divmod(sequence.computed, self._config.block_size)
        copies = bool(offset) and self.pool.is_shared(sequence.table[first])
        missing = self._blocks(sequence.computed + count) - len(sequence.table)
        if missing + copies > self.pool.num_available:
            return False
        if copies:
            sequence.table.replace(first, (self.pool.copy_on_write(sequence.table[first]),))
        if missing > 0:
            sequence.table.extend(self.pool.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.request.preemptions += 1
        self.preemptions += 1
        self.enqueue(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.table.take())
        sequence.computed = 0
        sequence.published = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def _batch(self, work: list[Work]) -> Batch:
        cost = self._config.cost
        batch = Batch(work, 0, 0.0, 0, 0.0, cost.step)
        for item in work:
            sequence = item.sequence
            if item.count == 1 and sequence.generated:
                batch.decode_tokens += 1
                batch.decode_seconds += cost.decode_seconds(sequence.computed)
            else:
                batch.prefill_tokens += item.count
                batch.prefill_seconds += cost.prefill_seconds(item.count, sequence.computed)
        return batch


def tokens_waiting(sequences: list[Sequence]) -> int:
    """Tokens that sequences which wait have, cached or not."""
    return sum(len(sequence.packed) for sequence in sequences) // TOKEN_BYTES
