"""Eviction by the time to the next use (after KVFlow, arXiv 2507.07400), not by recency.

Superseded blocks go first, then those of idle sessions, least recently used first, then those of sessions that wait for a tool,
the latest predicted return first, then what several sessions begin with, then what is pinned. Whoever waits for much longer
than was predicted, and pins that are over, count as idle. Without any marks it is LRU.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING

_LEAST_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    standing: int
    expected: float
    until: float


class ExpectedUsePolicy:
    """An `EvictionPolicy`. Times are of `clock`. Operations are O(log n) at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[int, OrderedDict[int, None]] = {
            standing: OrderedDict() for standing in (SUPERSEDED, IDLE, SHARED, PINNED)
        }
        self._standing: dict[int, int] = {}  # of the blocks in the order
        self._stamps: dict[int, int] = {}  # of those that wait or are pinned: which entry of the heaps is theirs
        self._waiting: list[tuple[float, int, int]] = []  # (-expected, stamp, block)
        self._ends: list[tuple[float, int, int]] = []  # (when the mark means nothing any more, stamp, block)
        self._next_stamp = 0
        self._marks: dict[int, _Mark] = {}
        self._sessions: dict[int, int] = {}
        self._shared: set[int] = set()

    def add(self, block: int) -> None:
        mark = self._marks.get(block)
        self._place(block, mark or _Mark(IDLE, 0.0, 0.0))

    def remove(self, block: int) -> None:
        self._take_out(block)
        # It is in use again: what was foreseen has come.
        self._marks.pop(block, None)

    def supersede(self, block: int) -> None:
        self._take_out(block)
        self._marks.pop(block, None)
        self._standing[block] = SUPERSEDED
        line = self._lines[SUPERSEDED]
        line[block] = None
        line.move_to_end(block, last=False)

    def mark(self, block: int, standing: int, expected: float, session: int) -> None:
        if session:
            before = self._sessions.setdefault(block, session)
            if before != session:
                self._shared.add(block)
                self._sessions[block] = session
        if block in self._shared and standing != PINNED:
            standing = SHARED
        now = self._clock()
        until = 0.0
        if standing == WAITING:
            until = expected + max(expected - now, _LEAST_GRACE)
        elif standing == PINNED:
            until = expected
        mark = self._marks[block] = _Mark(standing, expected, until)
        if block in self._standing:
            self._take_out(block)
            self._place(block, mark)

    def forget(self, block: int) -> None:
        self._marks.pop(block, None)
        self._sessions.pop(block, None)
        self._shared.discard(block)

    def pop(self) -> int:
        block = self.pop_below(float("-inf"))
        if block is not None:
            return block
        for standing in (SHARED, PINNED):
            if self._lines[standing]:
                return self._popped(next(iter(self._lines[standing])))
        raise KeyError("there is no block to give up")

    def pop_below(self, expected: float) -> int | None:
        self._expire()
        for standing in (SUPERSEDED, IDLE):
            if self._lines[standing]:
                return self._popped(next(iter(self._lines[standing])))
        while self._waiting:
            later, stamp, block = self._waiting[0]
            if self._standing.get(block) == WAITING and self._stamps.get(block) == stamp:
                return self._popped(block) if -later > expected else None
            heapq.heappop(self._waiting)
        return None

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, block: object) -> bool:
        return block in self._standing

    def __iter__(self) -> Iterator[int]:
        self._expire()
        yield from self._lines[SUPERSEDED]
        yield from self._lines[IDLE]
        for _, stamp, block in sorted(self._waiting):
            if self._standing.get(block) == WAITING and self._stamps.get(block) == stamp:
                yield block
        yield from self._lines[SHARED]
        yield from self._lines[PINNED]

    def _popped(self, block: int) -> int:
        self._take_out(block)
        self.forget(block)
        return block

    def _place(self, block: int, mark: _Mark) -> None:
        self._standing[block] = mark.standing
        if mark.standing in (WAITING, PINNED):
            stamp = self._stamps[block] = self._next_stamp
            self._next_stamp += 1
            heapq.heappush(self._ends, (mark.until, stamp, block))
            if mark.standing == WAITING:
                heapq.heappush(self._waiting, (-mark.expected, stamp, block))
        if mark.standing != WAITING:
            self._lines[mark.standing][block] = None
        if len(self._ends) + len(self._waiting) > 4 * len(self._standing) + 64:
            self._compact()

    def _take_out(self, block: int) -> None:
        standing = self._standing.pop(block)
        self._stamps.pop(block, None)
        if standing != WAITING:
            del self._lines[standing][block]

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] < now:
            _, stamp, block = heapq.heappop(self._ends)
            if self._stamps.get(block) != stamp:
                continue
            self._take_out(block)
            self._marks.pop(block, None)
            self._standing[block] = IDLE
            line = self._lines[IDLE]
            line[block] = None
            line.move_to_end(block, last=False)  # it was left long ago

    def _compact(self) -> None:
        """Drops entries of blocks that were marked again, or used, since."""
        self._ends = [entry for entry in self._ends if self._stamps.get(entry[2]) == entry[1]]
        self._waiting = [entry for entry in self._waiting if self._stamps.get(entry[2]) == entry[1]]
        heapq.heapify(self._ends)
        heapq.heapify(self._waiting)
