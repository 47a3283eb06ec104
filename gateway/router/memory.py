"""Where sessions live. Bounded."""

from __future__ import annotations

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

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable, now: float) -> str | None:
        entry = self.entry(key, now)
        return None if entry is None else entry[0]

    def entry(self, key: Hashable, now: float) -> tuple[str, float] | None:
        """The worker, and when the session was last seen."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry[1] > self._ttl:
            del self._entries[key]
            return None
        return entry

    def put(self, key: Hashable, worker: str, now: float) -> None:
        self._entries[key] = (worker, now)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        self._entries.pop(key, None)
