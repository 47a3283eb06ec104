"""A host tier on a virtual clock: what is loaded and decided is real, only the bytes are not there.

Loads and stores take the time they are said to take, one block after the other on one pipe, loads before what is fetched for
sessions that are away, and that before stores. What of it is copying and verifying the steps beside it feel; the rest is
waiting for a medium.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.movers import Movers
from engine.offloading import Offloading
from offload.checksum import Bytes
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.stack import TierStack
from offload.tickets import LoadTicket
from offload.tier import Outgoing, TierFigures
from offload.transfers import Filled, TransferCounts
from prefix_cache.block_pool import BlockPool
from prefix_cache.events import HOST, KVEvent
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import BlockHash

_NOTHING: Bytes = np.empty(0, dtype=np.uint8)

SecondsOf = Callable[[float], float]
"""Seconds that a block takes whose load begins at a time."""


class VirtualTier:
    """A `Tier` that has what it was given; beyond `max_blocks` what is worth least goes."""

    name = HOST

    def __init__(self, clock: Callable[[], float], max_blocks: int = 1 << 60) -> None:
        self.has: dict[BlockHash, int] = {}
        self._max_blocks = max_blocks
        self._digests: dict[int, BlockHash] = {}
        self._order = ExpectedUsePolicy(clock)
        self._spare: list[int] = []  # numbers that nothing has any more: the order wants small ones

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        for at, digest in enumerate(digests):
            if digest not in self.has:
                return at
        return len(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return [digest for digest in digests if digest not in self.has]

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        return digest in self.has

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        """Nothing to prepare."""

    def touch(self, digests: Sequence[BlockHash]) -> None:
        """These were used, so they are the last to go of their kind; the end of a sequence before its beginning."""
        numbers = [self.has[digest] for digest in reversed(digests) if digest in self.has]
        self._order.remove_all(numbers)
        self._order.add_all(numbers)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        for block in blocks:
            if block.digest in self.has or not self._max_blocks:
                continue
            if len(self.has) >= self._max_blocks:
                (worst,) = self._order.pop_all(1)
                del self.has[self._digests.pop(worst)]
                self._spare.append(worst)
            number = self._spare.pop() if self._spare else len(self.has)
            self.has[block.digest], self._digests[number] = number, block.digest
            self._order.add_all([number])
        return [block.digest for block in blocks if block.digest in self.has]

    def evict(self, digests: Iterable[BlockHash]) -> int:
        gone = [digest for digest in digests if digest in self.has]
        for digest in gone:
            number = self.has.pop(digest)
            del self._digests[number]
            self._order.remove_all([number])
            self._order.forget_all([number])
            self._spare.append(number)
        return len(gone)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        found = [self.has[digest] for digest in reversed(digests) if digest in self.has]
        self._order.mark_all(found, standing, expected, session)
        return len(found)

    def figures(self) -> TierFigures:
        return TierFigures(len(self.has), len(self.has), self._max_blocks)

    def check_integrity(self) -> None:
        """There are no books."""

    def close(self) -> None:
        """There is nothing to leave."""


class VirtualTransfers:
    """What `offload.transfers.Transfers` is, in virtual time. `load_seconds`: of a block; `store_seconds` likewise."""

    def __init__(
        self,
        tier: GuardedTier,
        generations: Sequence[int],
        clock: Callable[[], float],
        load_seconds: SecondsOf,
        store_seconds: float,
    ) -> None:
        self.counts = TransferCounts()
        self._tier = tier
        self._generations = generations
        self._clock = clock
        self._load_seconds = load_seconds
        self._store_seconds = store_seconds
        self._time = 0.0  # up to when the pipe has worked
        self._busy = 0.0
        self._loads: deque[LoadTicket] = deque()
        self._fetches: deque[LoadTicket] = deque()
        self._stores: deque[Filled] = deque()
        self._finished: deque[LoadTicket] = deque()

    def take_busy(self) -> float:
        """Seconds that the pipe has worked since the last call."""
        self._go_on()
        busy, self._busy = self._busy, 0.0
        return busy

    def due_in(self) -> float | None:
        """Seconds until the next block is there that somebody waits for; None: none."""
        self._go_on()
        if not self._loads and not self._fetches:
            return None
        return max(1e-6, self._time + self._load_seconds(self._time) - self._clock())

    def load(self, ticket: LoadTicket) -> None:
        self._go_on()
        self._loads.append(ticket)

    def fetch(self, ticket: LoadTicket) -> None:
        self._go_on()
        self._fetches.append(ticket)

    def store(self, filled: Sequence[Filled]) -> None:
        self._go_on()
        self._stores.extend(filled)

    def computing(self, is_computing: bool) -> None:
        """Stores come after everything else anyhow."""

    def promote(self, digests: Sequence[BlockHash]) -> None:
        """There is nothing below."""

    def finished(self) -> list[LoadTicket]:
        self._go_on()
        done = list(self._finished)
        self._finished.clear()
        return done

    @property
    def has_finished(self) -> bool:
        self._go_on()
        return bool(self._finished)

    def wait_idle(self, timeout: float) -> bool:
        return True

    def close(self, flush_seconds: float = 10.0) -> None:
        """There are no threads."""

    def _go_on(self) -> None:
        """Does what could be done up to now."""
        now = self._clock()
        while True:
            for queue in (self._loads, self._fetches):
                while queue and (queue[0].cancelled or queue[0].loaded == len(queue[0].blocks)):
                    ticket = queue.popleft()
                    ticket.done = True
                    if isinstance(self._tier.inner, VirtualTier):
                        self._tier.inner.touch(ticket.digests[: ticket.loaded])
                    if queue is self._loads:
                        self._finished.append(ticket)
            loading = next((queue[0] for queue in (self._loads, self._fetches) if queue), None)
            if loading is None and not self._stores:
                self._time = now
                return
            seconds = self._store_seconds if loading is None else self._load_seconds(self._time)
            if self._time + seconds > now:
                return
            self._time += seconds
            self._busy += min(seconds, self._store_seconds)
            if loading is not None:
                loading.loaded += 1
                loading.by_tier[HOST] = loading.by_tier.get(HOST, 0) + 1
                self._tier.cost.took(1, seconds)
            else:
                filled = self._stores.popleft()
                if self._generations[filled.block] == filled.generation:
                    self._tier.store((Outgoing(filled.digest, _NOTHING, filled.depth, filled.session),))
                    self.counts.stored += 1
                else:
                    self.counts.stale += 1


class VirtualKeeper:
    """What `offload.keeper.TierKeeper` is, where nothing has to be looked after but what blocks are worth."""

    def __init__(self, tier: GuardedTier) -> None:
        self._tier = tier

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> None:
        self._tier.mark(digests, standing, expected=expected, session=session)

    def at(self, when: float, work: Callable[[], None]) -> None:
        """There is nothing below to promote from."""

    def take_events(self) -> list[KVEvent]:
        return []

    def take_missing(self) -> list[BlockHash]:
        return []

    def snapshot(self) -> dict[str, bytes]:
        return {}

    def close(self) -> None:
        """There is no thread."""


class VirtualTiers:
    """Makes the tiers of an engine on a virtual clock. load_seconds, store_seconds: of a block. believed: what a block is
    believed to take before any was loaded. max_blocks: that the tier holds."""

    def __init__(
        self,
        clock: Callable[[], float],
        load_seconds: SecondsOf = lambda _now: 2e-4,
        store_seconds: float = 2e-4,
        believed: float = 2e-4,
        *,
        always: bool = False,
        max_blocks: int = 1 << 60,
    ) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._load_seconds = load_seconds
        self._store_seconds = store_seconds
        self._believed = believed
        self._always = always
        self.transfers: VirtualTransfers

    def __call__(self, pool: BlockPool) -> Offloading:
        """For the engine."""
        tier = GuardedTier(VirtualTier(self._clock, self._max_blocks), TransferCost(self._believed, self._clock), self._clock)
        self.transfers = VirtualTransfers(tier, pool.generations, self._clock, self._load_seconds, self._store_seconds)
        movers = Movers(self.transfers, VirtualKeeper(tier))
        return Offloading(TierStack((tier,), ()), pool, lambda _news, _waits: movers, 1, always=self._always, clock=self._clock)
