"""A load under way: which blocks go where, how far it is, and how it is called off."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from prefix_cache.hashing import BlockHash


class LoadTicket:
    """Blocks of one request that are being loaded, in the order of its prompt.

    The transfer thread writes to the device only while it holds `lock`, and only as long as the ticket was not called off.
    So when `cancel` returns, nothing is written to those blocks any more, whatever medium the thread waits for.
    """

    def __init__(self, digests: Sequence[BlockHash], blocks: Sequence[int], expected_seconds: float) -> None:
        self.digests = tuple(digests)
        self.blocks = tuple(blocks)
        self.expected_seconds = expected_seconds
        self.lock = threading.Lock()
        self.cancelled = False
        self.done = False
        self.loaded = 0
        """Blocks that hold what they should, counted from the first."""
        self.by_tier: dict[str, int] = {}
        self.started_at: float | None = None

    def cancel(self) -> int:
        """Calls the load off. Returns how many blocks were loaded; the others hold anything, and will not be written to."""
        with self.lock:
            self.cancelled = True
            return self.loaded
