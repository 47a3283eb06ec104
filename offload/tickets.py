"""A load under way: which blocks go where, how far it is, and how it is called off."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from prefix_cache.hashing import BlockHash

LANES = 2
"""Threads that may load blocks of one request at once."""


class LoadTicket:
    """Blocks of one request that are being loaded, in the order of its prompt, by up to `LANES` threads.

    A transfer thread writes to the device only while it holds the lock of its lane, and only as long as the ticket was not
    called off. So when `cancel` returns, nothing is written to those blocks any more, whatever medium a thread waits for.
    """

    def __init__(self, digests: Sequence[BlockHash], blocks: Sequence[int], expected_seconds: float) -> None:
        self.digests = tuple(digests)
        self.blocks = tuple(blocks)
        self.expected_seconds = expected_seconds
        self.made_at = time.monotonic()
        self.lanes = tuple(threading.Lock() for _ in range(LANES))
        self.cancelled = False
        self.done = False
        self.loaded = 0
        """Blocks that hold what they should, counted from the first."""
        self.by_tier: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = len(self.blocks)
        self._taken = 0
        self._ahead: set[int] = set()  # loaded, while one before them is not
        self._inside = 0

    @property
    def left(self) -> int:
        """Blocks that nobody has begun to load; 0 once it was called off."""
        return 0 if self.cancelled else max(0, self._end - self._taken)

    @property
    def is_deserted(self) -> bool:
        """True when no thread is at it."""
        return self._inside == 0

    def enter(self) -> bool:
        """A thread begins to work at it. True for the first one."""
        with self._lock:
            self._inside += 1
            return self._inside == 1 and not self._taken

    def leave(self) -> bool:
        """It ends. True when it was the last one, and nothing is left: the ticket is done."""
        with self._lock:
            self._inside -= 1
            return self._inside == 0 and not self.left

    def take(self) -> int | None:
        """Which block to load next; None when there is none."""
        with self._lock:
            if not self.left:
                return None
            self._taken += 1
            return self._taken - 1

    def has(self, index: int, tier: str) -> None:
        """That block holds what it should, from this tier."""
        with self._lock:
            self.by_tier[tier] = self.by_tier.get(tier, 0) + 1
            self._ahead.add(index)
            while self.loaded in self._ahead:
                self._ahead.remove(self.loaded)
                self.loaded += 1

    def lacks(self, index: int) -> None:
        """That block is nowhere any more: those behind it are of no use."""
        with self._lock:
            self._end = min(self._end, index)

    def cancel(self) -> int:
        """Calls the load off. Returns how many blocks were loaded; the others hold anything, and will not be written to."""
        self.cancelled = True
        for lane in self.lanes:
            with lane:
                pass  # whoever wrote has ended, and will see that it is off
        return self.loaded
