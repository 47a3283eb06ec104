"""A tier that may fail without anybody noticing but the counters.

After an error the tier is left alone for a second, after the next one for two, up to a minute: a medium that hangs or is full
costs its users nothing but that one call each time it is tried again. Reading and writing are left alone each for itself: a
disk that is full still has what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from offload.checksum import Bytes
from offload.errors import TierUnavailable
from offload.estimate import TransferCost
from offload.seldom import Seldom
from offload.tier import Outgoing, Tier, TierFigures
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0

ResultT = TypeVar("ResultT")


class _Pause:
    """For how long one kind of call is not made, and how long that would be the next time."""

    def __init__(self) -> None:
        self.until = 0.0
        self._next = FIRST_PAUSE

    def begin(self, now: float) -> float:
        """After an error; returns the seconds."""
        seconds = self._next
        self.until = now + seconds
        self._next = min(2 * seconds, LONGEST_PAUSE)
        return seconds

    def over(self) -> None:
        """It works."""
        self._next = FIRST_PAUSE


class GuardedTier:
    """A `Tier` that never raises, and knows what loading from it takes. While it is left alone for reading it holds nothing."""

    def __init__(self, tier: Tier, cost: TransferCost, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = tier.name
        self.inner = tier
        self.cost = cost
        self.errors = 0
        self._clock = clock
        self._reading, self._writing = _Pause(), _Pause()
        self._warn = Seldom(logger)

    @property
    def is_available(self) -> bool:
        """False while it is left alone, be it for reading or for writing."""
        return self._clock() >= max(self._reading.until, self._writing.until)

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        return self._try(self._reading, lambda: self.inner.prefix(digests), 0)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        missing: Sequence[BlockHash] | None = self._try(self._reading, lambda: self.inner.lacking(digests), None)
        return digests if missing is None else missing

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        began = time.perf_counter()
        loaded = self._try(self._reading, lambda: self.inner.load(digest, into), False, proof=True)
        if loaded:
            self.cost.took(1, time.perf_counter() - began)
        return loaded

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        self._try(self._reading, lambda: self.inner.ahead(digests), None)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        return self._try(self._writing, lambda: self.inner.store(blocks), [], proof=True)

    def evict(self, digests: Iterable[BlockHash]) -> int:
        return self._try(self._writing, lambda: self.inner.evict(digests), 0)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self._try(self._writing, lambda: self.inner.mark(digests, standing, expected=expected, session=session), 0)

    def figures(self) -> TierFigures:
        """Errors are those of this process."""
        figures = self.inner.figures()
        return TierFigures(
            figures.blocks,
            figures.used_bytes,
            figures.max_bytes,
            figures.stored,
            figures.evicted,
            figures.healed,
            figures.reclaimed,
            self.errors,
            figures.users,
        )

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def close(self) -> None:
        self._try(_Pause(), self.inner.close, None)

    def _try(self, pause: _Pause, call: Callable[[], ResultT], otherwise: ResultT, *, proof: bool = False) -> ResultT:
        now = self._clock()
        if now < pause.until:
            return otherwise
        try:
            result = call()
        except (OSError, TierUnavailable) as error:
            self.errors += 1
            what = "reading from" if pause is self._reading else "writing to"
            seconds = pause.begin(self._clock())
            self._warn.say("%s the %s tier is left alone for %g s: %s", what, self.name, seconds, error)
            return otherwise
        if proof:  # others hardly ask the medium
            pause.over()
        return result
