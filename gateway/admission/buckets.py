"""Token buckets: so much a minute, saved up for one minute. In this process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """`wait` 0: it was taken. Else nothing was, and in so many seconds it could be. `left`: in the bucket, below zero after
    more was used than was asked for."""

    left: float
    wait: float = 0.0


class Buckets:
    """Buckets by name. The least recently used go first when there are more than `capacity`; a bucket that is not here is
    full."""

    def __init__(self, capacity: int = 100_000, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, name: str, cost: float, per_minute: float) -> Taken:
        """Takes `cost` where so much is there. More than a minute's worth is taken from a full bucket, and owed."""
        level = self.level(name, per_minute)
        missing = min(cost, per_minute) - level
        if missing > 1e-9:
            return Taken(level, missing * 60 / per_minute)
        self.put(name, level - cost)
        return Taken(level - cost)

    def give(self, name: str, amount: float, per_minute: float) -> None:
        """Puts back what was taken and not used; below zero: takes what was used beyond it."""
        self.put(name, min(self.level(name, per_minute) + amount, per_minute))

    def level(self, name: str, per_minute: float) -> float:
        """What is in a bucket now."""
        known = self._levels.get(name)
        if known is None:
            return per_minute
        level, at = known
        return min(level + max(self._clock() - at, 0.0) * per_minute / 60, per_minute)

    def put(self, name: str, level: float) -> None:
        """Says what is in a bucket now."""
        self._levels[name] = (level, self._clock())
        self._levels.move_to_end(name)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
