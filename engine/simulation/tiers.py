"""Tiers below a simulated device: the real tables, arenas and directories, with stand-ins for blocks and made-up times.

What is kept, what goes first, what siblings see and what the world is told are the real tiers' doing (offload.arena,
offload.disk_store), so simulated replicas of one machine share them as real ones do. A block is a stand-in of a few bytes that
is verified like any other; how many fit follows from what a real one would take, and loading lasts as long as that would at so
many bytes a second. Storing takes no simulated time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.simulation.clock import Clock
from engine.simulation.config import SimulationConfig
from engine.simulation.sequences import Sequence as SimulatedSequence
from gateway.workers.protocol import TierStats
from offload.arena import HostArena
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from offload.estimate import TransferCost, split_point
from offload.guard import GuardedTier
from offload.mirror import TierMirror
from offload.tier import Outgoing
from prefix_cache.events import DISK, HOST, KVEvent
from prefix_cache.hashing import BlockHash, namespace_digest

logger = logging.getLogger(__name__)

_STANDIN_BYTES = 64
_SLOT_BYTES = 4096
_USEFUL_FOR = 600.0
_MAX_TIMERS = 10_000
_LOOK_EVERY = 0.05


@dataclass(slots=True)
class Load:
    """Blocks of a sequence from number `first` on, there at `ready_at`."""

    sequence: SimulatedSequence
    first: int
    digests: Sequence[BlockHash]
    ready_at: float


class SimulatedTiers:
    """Belongs to the engine thread. Times are of `clock`."""

    def __init__(self, config: SimulationConfig, namespace: BlockHash, clock: Clock) -> None:
        """One that cannot be used is said in the log and left out."""
        self.prefetched = 0
        self.useless_prefetches = 0
        self.hit_blocks: dict[str, int] = {}
        self._config = config
        self._clock = clock
        self._block_bytes = config.kv_token_bytes * config.block_size
        self._tiers: list[GuardedTier] = []
        self._mirrors: list[TierMirror] = []
        self._seconds: dict[str, float] = {}
        self._free_at: dict[str, float] = {}
        self._timers: list[tuple[float, int, Sequence[BlockHash], bool]] = []
        self._numbers = itertools.count()
        self._promoted: OrderedDict[BlockHash, float] = OrderedDict()
        self._events: list[KVEvent] = []
        self._buffer = np.empty(_STANDIN_BYTES, dtype=np.uint8)
        self._open(namespace_digest({"simulated": namespace.hex(), "kv_token_bytes": config.kv_token_bytes}))

    def _open(self, key: BlockHash) -> None:
        offload = self._config.offload
        if offload is None:
            return
        for name, size, rate in (
            (HOST, offload.host_bytes, self._config.host_rate),
            (DISK, offload.disk_bytes if offload.disk is not None else 0, self._config.disk_rate),
        ):
            if not size:
                continue
            slots = size // self._block_bytes
            try:
                if slots < 1:
                    raise TierUnavailable(
                        f"The {name} tier has {size} bytes, but one simulated block takes {self._block_bytes}; give it more."
                    )
                tier: HostArena | DiskStore
                if offload.disk is None or name == HOST:
                    tier = HostArena(key, _STANDIN_BYTES, slots * _SLOT_BYTES, offload.shared_memory)
                else:
                    tier = DiskStore(
                        offload.disk,
                        key,
                        _STANDIN_BYTES,
                        slots * (_SLOT_BYTES + 64),
                        min_free=offload.disk_min_free,
                        model=self._config.model,
                        codec="simulated",
                        tables=offload.shared_memory,
                    )
            except (TierUnavailable, OSError) as error:
                logger.warning("no %s tier: %s", name, error)
                continue
            seconds = self._block_bytes / rate
            self._tiers.append(GuardedTier(tier, TransferCost(seconds)))
            self._mirrors.append(TierMirror(tier.table, name))
            self._seconds[name] = seconds

    # Loading.

    def plan(self, sequence: SimulatedSequence, found: int, count: int) -> int:
        """How many of the blocks `found` to `count - 1` to load: those that are there, as far as that is faster."""
        wanted = sequence.digests[found:count]
        seconds = [each for tier, here in self._where(wanted) for each in itertools.repeat(self._seconds[tier.name], here)]
        if not seconds:
            return 0
        if self._config.offload is not None and self._config.offload.load == "always":
            return len(seconds)
        cost, size = self._config.cost, self._config.block_size
        computing = [cost.prefill_seconds(size, (found + block) * size) for block in range(len(seconds))]
        # A reader that others keep busy takes as long again.
        queue = max((at - self._clock.now() for at in self._free_at.values()), default=0.0)
        return split_point(seconds, computing, max(0.0, queue))

    def begin(self, sequence: SimulatedSequence, first: int, count: int) -> Load:
        """Loads `count` blocks from number `first` on."""
        digests = tuple(sequence.digests[first : first + count])
        at = self._clock.now()
        for tier, here in self._where(digests):
            at = max(at, self._free_at.get(tier.name, 0.0)) + here * self._seconds[tier.name] * self._config.time_scale
            self._free_at[tier.name] = at
        return Load(sequence, first, digests, at)

    def end(self, load: Load) -> int:
        """How many blocks of a load, from its first on, are there and whole."""
        for done, digest in enumerate(load.digests):
            name = self._read(digest)
            if name is None:
                return done
            if name == HOST:
                self._promoted.pop(digest, None)
            else:
                self._keep(HOST, (digest,), 0, 0)
            self.hit_blocks[name] = self.hit_blocks.get(name, 0) + 1
        return len(load.digests)

    def _where(self, digests: Sequence[BlockHash]) -> list[tuple[GuardedTier, int]]:
        """Which tiers have how many of `digests`, from the first on, the fastest first."""
        found: list[tuple[GuardedTier, int]] = []
        at = 0
        while at < len(digests):
            for tier in self._tiers:
                here = tier.prefix(digests[at:])
                if here:
                    found.append((tier, here))
                    at += here
                    break
            else:
                break
        return found

    def _read(self, digest: BlockHash) -> str | None:
        for tier in self._tiers:
            if tier.prefix((digest,)) and tier.load(digest, self._buffer) and bytes(self._buffer) == _standin(digest):
                return tier.name
        return None

    # Storing, and what blocks are worth.

    def store(self, digests: Sequence[BlockHash], depth: int, session: int) -> None:
        """These blocks, the first of them number `depth` of its sequence, are full and computed."""
        for tier in self._tiers:
            self._keep(tier.name, digests, depth, session)

    def _keep(self, name: str, digests: Sequence[BlockHash], depth: int, session: int) -> None:
        for tier in self._tiers:
            if tier.name == name:
                tier.store(
                    [
                        Outgoing(digest, np.frombuffer(_standin(digest), dtype=np.uint8), depth + number, session)
                        for number, digest in enumerate(digests)
                    ]
                )

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> None:
        """What blocks are worth from now on (prefix_cache.worth)."""
        machine = time.monotonic() + expected - self._clock.now() if expected else 0.0
        for tier in self._tiers:
            tier.mark(digests, standing, expected=machine, session=session)

    def promote_at(self, when: float, digests: Sequence[BlockHash]) -> None:
        """These will be asked for after `when`: what lies on disk only is brought into memory then."""
        if len(self._tiers) > 1 and len(self._timers) < _MAX_TIMERS:
            heapq.heappush(self._timers, (when, next(self._numbers), digests, False))

    # Time, and news.

    def wakes_in(self) -> float | None:
        """Seconds until there may be something to do or to tell; None without tiers."""
        if not self._tiers:
            return None
        return _LOOK_EVERY if not self._timers else min(_LOOK_EVERY, max(0.0, self._timers[0][0] - self._clock.now()))

    @property
    def has_news(self) -> bool:
        """True when `look` or `take_events` would do something."""
        if self._timers and self._timers[0][0] <= self._clock.now():
            return True
        return bool(self._events) or any(mirror.is_behind for mirror in self._mirrors)

    def look(self) -> None:
        """Does what is due."""
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            _, number, digests, is_there = heapq.heappop(self._timers)
            missing = self._tiers[0].lacking(digests)
            nowhere = self._tiers[-1].lacking(missing)
            below: Sequence[BlockHash] = ()
            if len(nowhere) < len(missing):
                gone = set(nowhere)
                below = [digest for digest in missing if digest not in gone]
            if is_there:
                self._promote(below, now)
            elif below:
                began = max(now, self._free_at.get(DISK, 0.0))
                there = began + len(below) * self._seconds[DISK] * self._config.time_scale
                self._free_at[DISK] = there
                heapq.heappush(self._timers, (there, number, below, True))
        while self._promoted and next(iter(self._promoted.values())) < now - _USEFUL_FOR:
            self._promoted.popitem(last=False)
            self.useless_prefetches += 1

    def _promote(self, digests: Sequence[BlockHash], now: float) -> None:
        for digest in digests:
            if self._read(digest) == DISK:
                self._keep(HOST, (digest,), 0, 0)
                self.prefetched += 1
                self._promoted[digest] = now

    def take_events(self) -> list[KVEvent]:
        """What has changed in the tiers, whoever changed it."""
        self._poll()
        events, self._events = self._events, []
        return events

    def snapshot(self) -> dict[str, bytes]:
        """Tier -> joined digests."""
        self._poll()
        return {mirror.tier: mirror.snapshot() for mirror in self._mirrors}

    def _poll(self) -> None:
        for mirror in self._mirrors:
            self._events.extend(mirror.poll())

    def stats(self) -> tuple[TierStats, ...]:
        """As of real tiers with real blocks."""
        stats = []
        for tier in self._tiers:
            figures = tier.figures()
            stats.append(
                TierStats(
                    name=tier.name,
                    blocks=figures.blocks,
                    used_bytes=figures.blocks * self._block_bytes,
                    max_bytes=figures.max_bytes // _SLOT_BYTES * self._block_bytes,
                    stored_blocks_total=figures.stored,
                    evicted_blocks_total=figures.evicted,
                    healed_blocks_total=figures.healed,
                    hit_tokens_total=self.hit_blocks.get(tier.name, 0) * self._config.block_size,
                    errors_total=figures.errors,
                    seconds_per_block=self._seconds[tier.name],
                    users=figures.users,
                )
            )
        return tuple(stats)

    def check_integrity(self) -> None:
        """Raises TierCorrupt when a tier's books do not balance."""
        for tier in self._tiers:
            tier.check_integrity()

    def close(self) -> None:
        """Leaves the tiers. Idempotent."""
        for tier in self._tiers:
            tier.close()


def _standin(digest: BlockHash) -> bytes:
    return digest * (_STANDIN_BYTES // len(digest))
