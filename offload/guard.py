"""A tier that may fail without anybody noticing but the counters.

After an error the tier is left alone for a second, after the next one for two, up to a minute: a medium that hangs or is full
costs its users nothing but that one call each time it is tried again.
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


class GuardedTier:
    """A `Tier` that never raises, and knows what loading from it takes. While it is left alone it holds nothing."""

    def __init__(self, tier: Tier, cost: TransferCost, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = tier.name
        self.inner = tier
        self.cost = cost
        self.errors = 0
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._warn = Seldom(logger)

    @property
    def is_available(self) -> bool:
        """False while it is left alone."""
        return self._clock() >= self._until

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        return self._try(lambda: self.inner.prefix(digests), 0)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        began = time.perf_counter()
        loaded = self._try(lambda: self.inner.load(digest, into), False)
        if loaded:
            self.cost.took(1, time.perf_counter() - began)
        return loaded

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        self._try(lambda: self.inner.ahead(digests), None)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        return self._try(lambda: self.inner.store(blocks), [])

    def evict(self, digests: Iterable[BlockHash]) -> int:
        return self._try(lambda: self.inner.evict(digests), 0)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self._try(lambda: self.inner.mark(digests, standing, expected=expected, session=session), 0)

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
        self._try(self.inner.close, None)

    def _try(self, call: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        if not self.is_available:
            return otherwise
        try:
            result = call()
        except (OSError, TierUnavailable) as error:
            self.errors += 1
            self._until = self._clock() + self._pause
            self._warn.say("the %s tier is left alone for %g s: %s", self.name, self._pause, error)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return otherwise
        self._pause = FIRST_PAUSE
        return result
