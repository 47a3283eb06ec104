"""The remote tier as those see it who do not serve (offload.inspection)."""

from __future__ import annotations

import time
from typing import Any

from offload.inspection import HeldTier, Inspected
from offload.remote_books import RemoteBooks, connect, kinds
from offload.remote_store import REMOTE
from prefix_cache.hashing import BlockHash

_IN_USE = 10.0
"""Seconds; who uses it says so every three."""


class HeldRemote(HeldTier):
    """One kind of block in a Redis."""

    tier = REMOTE

    def __init__(self, client: Any, place: str, key: BlockHash) -> None:
        self.key = key.hex()
        self._books = RemoteBooks(client, key)
        self._place = place

    def look(self) -> Inspected:
        about, totals = self._books.about(), self._books.totals()
        return Inspected(
            REMOTE,
            self.key,
            self._place,
            about.model,
            about.codec,
            totals.blocks,
            totals.blocks * about.block_bytes,
            about.max_bytes,
            self._is_in_use(about.seen),
            about.seen or None,
        )

    def verify(self) -> tuple[int, int]:
        return self._books.verify()

    def trim(self, size: int | float) -> tuple[int, int]:
        each = max(1, self._books.about().block_bytes)
        before = self._books.totals().blocks
        bound = int(size * before) if isinstance(size, float) else size // each
        gone = self._books.shrink(bound)
        left = self._books.totals().blocks
        if not left and not self._is_in_use(self._books.about().seen):
            self._books.forget()
        return gone, left * each

    @staticmethod
    def _is_in_use(seen: float) -> bool:
        return abs(time.time() - seen) < _IN_USE


def held_remote(url: str) -> list[HeldRemote]:
    """What a Redis holds. Raises TierUnavailable."""
    client = connect(url)
    settings = client.connection_pool.connection_kwargs
    # As its users know it, without the password.
    at = settings.get("path") or f"{settings.get('host')}:{settings.get('port')}"
    return [HeldRemote(client, f"{at}/{settings.get('db', 0)}", key) for key in kinds(client)]
