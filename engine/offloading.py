"""Between an engine and its tiers: what is loaded for a sequence, what is stored, and what has come of it.

Belongs to the engine thread, but for what it says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from engine.movers import MakeMovers, Movers
from engine.request import Sequence as EngineSequence
from gateway.workers.protocol import TierStats
from offload.codecs import BlockShape, make_codec
from offload.config import OffloadConfig
from offload.device import DeviceBlocks
from offload.estimate import PrefillCost, split_point
from offload.guard import GuardedTier
from offload.keeper import TierKeeper
from offload.stack import TierStack
from offload.tickets import LoadTicket
from offload.transfers import Filled, Transfers
from prefix_cache.block_pool import BlockPool
from prefix_cache.events import DISK, HOST, KVEvent
from prefix_cache.hashing import BlockHash

_OVERHEAD = 0.002
"""Seconds that a load takes beside its blocks: two threads wake up, and the step that waits ends first."""

_TYPICAL_CONTEXT = 2048
_LEAST_TOKENS = 64
_STATS_AGE = 1.0
_PATIENCE = 0.05
_LEAST_PATIENCE = 0.05


@dataclass(slots=True)
class _Load:
    """A load under way, from block `first` of its sequence on, and when a block has come last."""

    sequence: EngineSequence
    ticket: LoadTicket
    first: int
    began_at: float
    seen: int = 0
    progressed_at: float = 0.0

    def __post_init__(self) -> None:
        self.progressed_at = self.began_at


class Offloading:
    """Loads and stores the blocks of one engine."""

    def __init__(
        self,
        stack: TierStack,
        pool: BlockPool,
        movers: MakeMovers,
        block_bytes: int,
        *,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """block_bytes: of a block in the tiers. always: load what is there, whatever that takes."""
        self.prefill = PrefillCost()
        self.loaded_blocks: dict[str, int] = {}
        self.abandoned_loads = 0
        self._block_bytes = block_bytes
        self._always = always
        self._stack = stack
        self._pool = pool
        self._clock = clock
        self._stats: tuple[TierStats, ...] = ()
        self._stats_at = float("-inf")
        self._on_news: Callable[[], None] = _nothing
        self._loading: dict[int, _Load] = {}
        made = movers(self._news, lambda: bool(self._loading))
        self._transfers, self._keeper = made.mover, made.keeper

    @classmethod
    def over(
        cls,
        stack: TierStack,
        pool: BlockPool,
        device: DeviceBlocks,
        config: OffloadConfig,
        shape: BlockShape,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """With threads that move the blocks of `device`."""

        def movers(on_news: Callable[[], None], is_waiting: Callable[[], bool]) -> Movers:
            mover = Transfers(stack.tiers, device, pool.generations, config.codec, shape, on_news)
            return Movers(mover, TierKeeper(stack.tiers, stack.mirrors, on_news, is_waiting))

        encoded = make_codec(config.codec, shape).encoded_bytes
        return cls(stack, pool, movers, encoded, always=config.load == "always", clock=clock)

    def on_news(self, callback: Callable[[], None]) -> None:
        """`callback` is called on other threads when a step would find something new."""
        self._on_news = callback

    # Loading.

    def plan(self, sequence: EngineSequence, found: int, count: int) -> int:
        """How many of the blocks `found` to `count - 1` of a sequence to load: those that are there, as far as loading them is
        faster than computing them. Changes nothing."""
        seconds = self._load_seconds(sequence.digests[found:count])
        if not seconds or self._always:
            return len(seconds)
        # The shortest load goes first.
        own = sum(seconds)
        queue = sum(min(self._left(load), own) for load in self._loading.values())
        computing = self.prefill.of_blocks(found, len(seconds), self._pool.block_size)
        return split_point(seconds, computing.tolist(), _OVERHEAD + queue)

    def begin(self, sequence: EngineSequence, first: int) -> None:
        """Starts to load the blocks of a sequence's table from `first` on."""
        blocks = sequence.table.part(first)
        digests = sequence.digests[first : first + len(blocks)]
        ticket = LoadTicket(digests, blocks, sum(self._load_seconds(digests)))
        self._loading[id(sequence)] = _Load(sequence, ticket, first, self._clock())
        self._transfers.load(ticket)

    def _load_seconds(self, digests: Sequence[BlockHash]) -> list[float]:
        """What each of `digests` takes, from the fastest tier that has it, up to the first that none has."""
        seconds: list[float] = []
        while len(seconds) < len(digests):
            for tier in self._stack.tiers:
                here = tier.prefix(digests[len(seconds) :])
                if here:
                    seconds.extend([tier.cost.seconds] * here)
                    break
            else:
                break
        return seconds

    def _stalled(self, ticket: LoadTicket, seconds: float) -> None:
        """The block that a load waited for in vain has taken so long: what never comes would never be measured otherwise."""
        if ticket.loaded == len(ticket.blocks):
            return
        waited_for = ticket.digests[ticket.loaded]
        tier = next((tier for tier in self._stack.tiers if tier.prefix((waited_for,))), None)
        if tier is not None and seconds > tier.cost.seconds:
            tier.cost.took(1, seconds)

    def _is_worth_loading(self, tier: GuardedTier) -> bool:
        computing = self.prefill.seconds(_TYPICAL_CONTEXT, self._pool.block_size)
        return tier.is_available and (self._always or tier.cost.seconds < computing)

    def _left(self, load: _Load) -> float:
        """Seconds of loading that a load has still before it, as was expected."""
        ticket = load.ticket
        return ticket.expected_seconds * (1 - ticket.loaded / len(ticket.blocks))

    @property
    def is_fast(self) -> bool:
        """True when the fastest tier brings a block in less time than computing it takes."""
        fastest = next((tier for tier in self._stack.tiers if tier.is_available), None)
        return fastest is not None and self._is_worth_loading(fastest)

    def reach(self, digests: Sequence[BlockHash]) -> int:
        """How many of `digests`, counted from the first, can be brought onto the device now, from the fastest tier."""
        fastest = next((tier for tier in self._stack.tiers if tier.is_available), None)
        return 0 if fastest is None else fastest.prefix(digests)

    def fetch(self, digests: Sequence[BlockHash], blocks: Sequence[int]) -> LoadTicket:
        """Begins to copy blocks that nobody waits for yet."""
        ticket = LoadTicket(digests, blocks, 0.0)
        self._transfers.fetch(ticket)
        return ticket

    def tokens_meanwhile(self, most: int) -> int:
        """Tokens of prompts to compute in a step, `most` at most, so that it does not keep the load that is done first waiting
        for long."""
        left = min(map(self._left, self._loading.values()), default=None)
        if left is None:
            return most
        each = self.prefill.seconds(_TYPICAL_CONTEXT, 1)
        return min(most, max(_LEAST_TOKENS, int(left / each)))

    def cancel(self, sequence: EngineSequence) -> None:
        """Calls the load of a sequence off: when this returns its blocks are not written to any more."""
        self._loading.pop(id(sequence)).ticket.cancel()

    def arrived(self) -> list[tuple[EngineSequence, int]]:
        """Sequences whose load has ended, be it that patience has, with how many of their blocks were loaded."""
        done = set(map(id, self._transfers.finished()))
        ended: list[tuple[EngineSequence, int]] = []
        for key, load in list(self._loading.items()):
            ticket = load.ticket
            if id(ticket) not in done and not self._is_too_slow(load):
                continue
            loaded = ticket.cancel()
            if id(ticket) not in done:
                self.abandoned_loads += 1
                self._stalled(ticket, self._clock() - load.progressed_at)
            for tier, blocks in dict(ticket.by_tier).items():
                self.loaded_blocks[tier] = self.loaded_blocks.get(tier, 0) + blocks
            del self._loading[key]
            ended.append((load.sequence, loaded))
        return ended

    @property
    def has_arrived(self) -> bool:
        """True when `arrived` would return something."""
        if not self._loading:
            return False
        return self._transfers.has_finished or any(map(self._is_too_slow, self._loading.values()))

    @property
    def loading(self) -> int:
        """Sequences whose blocks are being loaded."""
        return len(self._loading)

    # Storing, and what blocks are worth.

    def computing(self, is_computing: bool) -> None:
        """A step begins to compute, or has ended."""
        self._transfers.computing(is_computing)

    def store(self, filled: Sequence[Filled]) -> None:
        """These blocks are full and computed."""
        missing = self._keeper.take_missing()
        if missing:
            known = ((digest, self._pool.block_of(digest)) for digest in missing)
            generations = self._pool.generations
            filled = [*filled, *(Filled(name, block, generations[block], 0) for name, block in known if block is not None)]
        if filled:
            self._transfers.store(filled)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> None:
        """What blocks are worth from now on (prefix_cache.worth)."""
        self._keeper.mark(digests, standing, expected=expected, session=session)

    def promote(self, digests: Sequence[BlockHash]) -> None:
        """These will be asked for soon."""
        self._transfers.promote(digests)

    def promote_at(self, when: float, digests: Sequence[BlockHash]) -> None:
        """These will be asked for after `when`, on the monotonic clock."""
        self._keeper.at(when, lambda: self._transfers.promote(digests))

    @property
    def prefetched(self) -> int:
        """Blocks brought into host memory before anybody asked."""
        return self._transfers.counts.promoted

    @property
    def useless_prefetches(self) -> int:
        """Those of them that nobody asked for in time."""
        return self._transfers.counts.useless

    @property
    def capacity(self) -> int:
        """Blocks that this engine's share of the largest tier of this machine holds, of those that can be used now, and from
        which loading is faster than computing. How much of a remote one is ours nobody knows."""
        usable = {tier.name for tier in self._stack.tiers if tier.name in (HOST, DISK) and self._is_worth_loading(tier)}
        shares = (tier.max_bytes // (self._block_bytes * tier.users) for tier in self.stats() if tier.name in usable)
        return max(shares, default=0)

    def take_events(self) -> list[KVEvent]:
        """What has changed in the tiers."""
        return self._keeper.take_events()

    def snapshot(self) -> dict[str, bytes]:
        """Tier -> joined digests."""
        return self._keeper.snapshot()

    def stats(self) -> tuple[TierStats, ...]:
        """What the tiers hold and have done; a second old at most."""
        now = self._clock()
        if now - self._stats_at > _STATS_AGE:
            self._stats_at = now
            self._stats = tuple(self._stats_of(tier) for tier in self._stack.tiers)
        return self._stats

    def _stats_of(self, tier: GuardedTier) -> TierStats:
        figures = tier.figures()
        return TierStats(
            name=tier.name,
            blocks=figures.blocks,
            used_bytes=figures.used_bytes,
            max_bytes=figures.max_bytes,
            stored_blocks_total=figures.stored,
            evicted_blocks_total=figures.evicted,
            healed_blocks_total=figures.healed,
            hit_tokens_total=self.loaded_blocks.get(tier.name, 0) * self._pool.block_size,
            errors_total=figures.errors,
            seconds_per_block=tier.cost.seconds,
            users=figures.users,
        )

    def wait_idle(self, timeout: float) -> bool:
        """Waits until no block is under way."""
        return self._transfers.wait_idle(timeout)

    def check_integrity(self) -> None:
        """Raises TierCorrupt when a tier's books do not balance."""
        for tier in self._stack.tiers:
            tier.check_integrity()

    def close(self) -> None:
        """Writes down what waits to be, and leaves the tiers. Idempotent."""
        self._transfers.close()
        self._keeper.close()
        self._stack.close()

    def _is_too_slow(self, load: _Load) -> bool:
        """True when computing what is not loaded yet is faster than waiting for it: no block has come for longer than a
        twentieth of that would take, or they come too slowly."""
        now = self._clock()
        loaded = load.ticket.loaded
        if loaded > load.seen:
            load.seen, load.progressed_at = loaded, now
        left = len(load.ticket.blocks) - loaded
        computing = float(self.prefill.of_blocks(load.first + loaded, left, self._pool.block_size).sum())
        if now - load.progressed_at > max(_LEAST_PATIENCE, _PATIENCE * computing):
            return True
        elapsed = now - load.began_at
        return elapsed > _LEAST_PATIENCE and loaded > 0 and elapsed / loaded * left > computing

    def _news(self) -> None:
        self._on_news()


def _nothing() -> None:
    pass
