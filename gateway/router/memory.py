"""What the router remembers besides residency: where sessions live, and who worked how much lately. All bounded."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable


class Homes:
    """Session -> the worker that took its last turn. Least recently used entries go first; entries die after `ttl`."""

    def __init__(self, capacity: int, ttl: float) -> None:
        self._capacity = capacity
        self._ttl = ttl
        self._entries: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, now: float) -> str | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry[1] > self._ttl:
            del self._entries[key]
            return None
        return entry[0]

    def put(self, key: Hashable, worker: str, now: float) -> None:
        self._entries[key] = (worker, now)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        self._entries.pop(key, None)


class RecentWork:
    """Tokens computed per worker, each counting half after `half_life` seconds."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._work: dict[str, tuple[float, float]] = {}

    def get(self, worker: str, now: float) -> float:
        value, at = self._work.get(worker, (0.0, now))
        return value * math.exp2(-max(now - at, 0.0) / self._half_life)

    def add(self, worker: str, tokens: float, now: float) -> None:
        self._work[worker] = (self.get(worker, now) + tokens, now)

    def forget(self, worker: str) -> None:
        self._work.pop(worker, None)
