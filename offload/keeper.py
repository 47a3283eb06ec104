"""What the tiers have done for them beside moving blocks: marking what blocks are worth, and telling what has changed."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from offload.guard import GuardedTier
from offload.mirror import TierMirror
from prefix_cache.events import KVEvent
from prefix_cache.hashing import BlockHash, JoinedDigests, as_joined

logger = logging.getLogger(__name__)

_MAX_MARKS = 4096
_MAX_TIMERS = 10_000
_MAX_EVENTS = 65_536

ItemT = TypeVar("ItemT")


class TierKeeper:
    """A thread of its own, which looks every `interval` seconds. `on_news` is called there when `take_events` or
    `take_missing` has something, and as long as `is_waiting` says that somebody waits for time to pass."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        mirrors: Sequence[TierMirror],
        on_news: Callable[[], None],
        is_waiting: Callable[[], bool],
        interval: float = 0.05,
    ) -> None:
        self._tiers = tuple(tiers)
        self._mirrors = tuple(mirrors)
        self._on_news = on_news
        self._is_waiting = is_waiting
        self._interval = interval
        self._marks: deque[tuple[JoinedDigests, int, float, int]] = deque(maxlen=_MAX_MARKS)

        self._events: deque[KVEvent] = deque(maxlen=_MAX_EVENTS)
        self._missing: deque[BlockHash] = deque(maxlen=_MAX_EVENTS)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-keeper", daemon=True)
        self._thread.start()

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> None:
        """Has blocks marked in every tier (prefix_cache.worth). `take_missing` has those that the fastest one lacks."""
        if digests:
            self._marks.append((as_joined(digests), standing, expected, session))
            self._wake.set()

    def at(self, when: float, work: Callable[[], None]) -> None:
        """Has `work` done at `when` on the monotonic clock, or soon after. The earliest are kept when too many wait."""
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._numbers), work))
            if len(self._timers) > _MAX_TIMERS:
                self._timers.remove(max(self._timers))
                heapq.heapify(self._timers)

    def take_events(self) -> list[KVEvent]:
        """What has changed in the tiers since the last call."""
        return _drain(self._events)

    def take_missing(self) -> list[BlockHash]:
        """Blocks that were marked and are not in the fastest tier."""
        return _drain(self._missing)

    def snapshot(self) -> dict[str, bytes]:
        """Tier -> joined digests, as of the events so far."""
        tiers: dict[str, bytes] = {}
        for mirror in self._mirrors:
            tiers[mirror.tier] = mirror.snapshot()
        return tiers

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:
                logger.exception("the tiers could not be looked after")
                time.sleep(self._interval)
            self._wake.wait(self._interval)
            self._wake.clear()

    def _due(self) -> list[Callable[[], None]]:
        now = time.monotonic()
        with self._lock:
            due = []
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2])
        return due

    def _look(self) -> None:
        news = self._is_waiting()
        for work in self._due():
            work()
        while self._marks:
            digests, standing, expected, session = self._marks.popleft()
            for number, tier in enumerate(self._tiers):
                found = tier.mark(digests, standing, expected=expected, session=session)
                if number == 0 and found < len(digests) and tier.is_available and standing:
                    self._missing.extend(tier.lacking(digests))
                    news = True
        for mirror in self._mirrors:
            events = mirror.poll()
            if events:
                self._events.extend(events)
                news = True
        if news:
            self._on_news()


def _drain(queue: deque[ItemT]) -> list[ItemT]:
    taken = []
    while queue:
        taken.append(queue.popleft())
    return taken
