"""Eviction by the time to the next use (after KVFlow, arXiv 2507.07400), not by recency.

Superseded blocks go first, then those of idle sessions, least recently used first, then those of sessions that wait for a tool,
the latest predicted return first, then what several sessions begin with, then what is pinned. Whoever waits for much longer
than was predicted, and pins that are over, count as idle, and go before others that are: they were left long ago. Without any
marks it is LRU.

Blocks that are named at once stay together, in the order in which they were named, whatever becomes of them: they are a run
(prefix_cache.runs), and it is runs that have a place in the order. So what is said of thousands of blocks costs a few
operations on arrays.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np

from prefix_cache.eviction import BlockIds
from prefix_cache.marks import Mark, Marks
from prefix_cache.runs import BlockArray, Run, Stamps
from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING

_LEAST_GRACE = 1.0
_NO_MARK = Mark(IDLE, 0.0, 0.0)
_LEAST_COST = 1024
_RUN_COST = 8

_Heap = list[tuple[float, int, Run]]


class ExpectedUsePolicy:
    """An `EvictionPolicy`. Times are of `clock`. Memory grows with the largest block id, so these should be small.

    A call costs O(log n) for each run that it touches, beside array operations over its blocks. What is moved or taken out
    leaves a stale entry behind; they are dropped when they outnumber the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamps = Stamps()
        self._marks = Marks()
        self._len = 0
        self._lines: dict[int, deque[Run]] = {standing: deque() for standing in (SUPERSEDED, IDLE, SHARED, PINNED)}
        self._waiting: _Heap = []  # (-expected, first stamp, run)
        self._ends: _Heap = []  # (until, -first stamp, run): who of those that wait or are pinned is idle next
        self._cost = 0  # of all entries and runs there are, stale or not
        self._most_cost = _LEAST_COST

    def add_all(self, blocks: BlockIds) -> None:
        blocks = self._array(blocks)
        self._len += len(blocks)
        for stretch, mark in self._marks.foreseen(blocks, _NO_MARK):
            self._place(stretch, mark)

    def remove_all(self, blocks: BlockIds) -> None:
        blocks = self._present(blocks)
        # They are in use again: what was foreseen has come.
        self._stamps.take_out(blocks)
        self._len -= len(blocks)

    def supersede_all(self, blocks: BlockIds) -> None:
        self._place(self._present(blocks)[::-1], Mark(SUPERSEDED, 0.0, 0.0), first=True)

    def mark_all(self, blocks: BlockIds, standing: int, expected: float, session: int) -> None:
        blocks = self._array(blocks)
        if session:
            self._marks.says(blocks, session)
        until = 0.0
        if standing == WAITING:
            until = expected + max(expected - self._clock(), _LEAST_GRACE)
        elif standing == PINNED:
            until = expected
        mark = Mark(standing, expected, until)
        shared = self._marks.shared(blocks)
        if standing != PINNED and shared.any():
            self._mark(blocks[shared], Mark(SHARED, 0.0, 0.0))
            blocks = blocks[~shared]
        self._mark(blocks, mark)

    def forget_all(self, blocks: BlockIds) -> None:
        self._marks.forget(self._array(blocks))

    def pop_all(self, count: int) -> list[int]:
        popped = self.pop_below(count, float("-inf"))
        for standing in (SHARED, PINNED):
            popped += self._draw_line(standing, count - len(popped))
        return popped

    def pop_below(self, count: int, expected: float) -> list[int]:
        self._expire()
        popped: list[int] = []
        for standing in (SUPERSEDED, IDLE):
            popped += self._draw_line(standing, count - len(popped))
        while self._waiting and len(popped) < count and -self._waiting[0][0] > expected:
            run = self._waiting[0][2]
            popped += self._draw(run, count - len(popped))
            if not len(run):
                heapq.heappop(self._waiting)
        return popped

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and 0 <= block < len(self._stamps) and bool(self._stamps.are_in(self._array([block]))[0])

    def __iter__(self) -> Iterator[int]:
        self._expire()
        for run in self._in_order():
            yield from self._stamps.alive(run).tolist()

    def _array(self, blocks: BlockIds) -> BlockArray:
        array = np.asarray(blocks, dtype=np.intp)
        if len(array) and (most := int(array.max())) >= len(self._stamps):
            size = max(most + 1, 2 * len(self._stamps))
            self._stamps.grow(size)
            self._marks.grow(size)
        return array

    def _present(self, blocks: BlockIds) -> BlockArray:
        array = self._array(blocks)
        there = self._stamps.are_in(array)
        if not there.all():
            raise KeyError(int(array[~there][0]))
        return array

    def _mark(self, blocks: BlockArray, mark: Mark) -> None:
        there = self._stamps.are_in(blocks)
        if there.all():
            self._place(blocks, mark)
        else:
            self._marks.foresee(blocks[~there], mark)
            self._place(blocks[there], mark)

    def _place(self, blocks: BlockArray, mark: Mark, *, first: bool = False) -> None:
        """Puts blocks where the mark has them; `first`: before all others that stand there."""
        if not len(blocks):
            return
        run = self._stamps.run(blocks, mark.until)
        number = int(run.stamps[0])
        self._cost += len(run) + _RUN_COST
        if mark.standing == WAITING:
            heapq.heappush(self._waiting, (-mark.expected, number, run))
        elif first:
            self._lines[mark.standing].appendleft(run)
        else:
            self._lines[mark.standing].append(run)
        if mark.standing in (WAITING, PINNED):
            self._cost += len(run) + _RUN_COST
            # A run of its own, as the other one's beginning is taken away.
            heapq.heappush(self._ends, (mark.until, -number, Run(run.blocks, run.stamps, mark.until)))
        if self._cost > self._most_cost:
            self._compact()

    def _draw_line(self, standing: int, count: int) -> list[int]:
        line = self._lines[standing]
        drawn: list[int] = []
        while line and len(drawn) < count:
            drawn += self._draw(line[0], count - len(drawn))
            if not len(line[0]):
                line.popleft()
        return drawn

    def _draw(self, run: Run, count: int) -> list[int]:
        """Takes blocks out of the order that something else will be in."""
        before = len(run)
        drawn = self._stamps.draw(run, count)
        self._cost -= before - len(run) + (0 if len(run) else _RUN_COST)
        self._len -= len(drawn)
        self._marks.forget(self._array(drawn))
        return drawn

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] < now:
            run = heapq.heappop(self._ends)[2]
            self._cost -= len(run) + _RUN_COST
            self._place(self._stamps.alive(run), _NO_MARK, first=True)

    def _in_order(self) -> Iterator[Run]:
        yield from self._lines[SUPERSEDED]
        yield from self._lines[IDLE]
        yield from (run for _, _, run in sorted(self._waiting))
        yield from self._lines[SHARED]
        yield from self._lines[PINNED]

    def _compact(self) -> None:
        """Drops stale entries, and makes one run of those that stand together."""
        for line in self._lines.values():
            runs = self._stamps.merged(line)
            line.clear()
            line.extend(runs)
        waiting = groupby(sorted(self._waiting), key=lambda entry: entry[0])
        self._waiting = [
            (key, int(run.stamps[0]), run) for key, group in waiting for run in self._stamps.merged(one for _, _, one in group)
        ]
        ends = groupby(sorted(self._ends, key=lambda entry: (entry[0], -entry[1])), key=lambda entry: entry[0])
        self._ends = [
            (key, -int(run.stamps[0]), run) for key, group in ends for run in self._stamps.merged(one for _, _, one in group)
        ]
        heapq.heapify(self._ends)
        heapq.heapify(self._waiting)
        runs = [*self._in_order(), *(run for _, _, run in self._ends)]
        self._cost = sum(len(run) + _RUN_COST for run in runs)
        self._most_cost = max(2 * self._cost, _LEAST_COST)
