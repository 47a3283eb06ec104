"""A tier whose place may go and come back: a directory that is removed, a file system that is not mounted yet.

What it was opened in is left at the first sign, and opened anew when there is something to be stored; who only asks does not
wait for that. Blocks that were there are not there then, and loaded from elsewhere or computed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from offload.checksum import Bytes
from offload.errors import TierGone, TierUnavailable
from offload.tier import Outgoing, Tier, TierFigures
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)


class _Opened:
    """A tier, and how many calls are in it."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.calls = 0
        self.is_left = False


class ReopeningTier:
    """A `Tier`. `opening` opens it, and raises TierUnavailable or OSError while that cannot be done; `max_bytes` is for figures
    meanwhile."""

    def __init__(self, name: str, opening: Callable[[], Tier], max_bytes: int) -> None:
        self.name = name
        self._opening = opening
        self._figures = TierFigures(0, 0, max_bytes)
        self._lock = threading.Lock()
        self._opening_lock = threading.Lock()
        self._opened: _Opened | None = None
        self._closed = False

    @property
    def inner(self) -> Tier | None:
        """The tier as it is open now."""
        opened = self._opened
        return None if opened is None else opened.tier

    @property
    def table(self) -> Any:
        """The shared table of the tier as it is open now. Raises TierUnavailable while it is not."""
        opened = self._opened
        if opened is None:
            raise TierUnavailable(f"The {self.name} tier is not open.")
        return getattr(opened.tier, "table", None)

    def open(self) -> None:
        """Opens it unless it is. Raises TierUnavailable and OSError."""
        with self._opening_lock:
            if self._opened is None and not self._closed:
                self._opened = _Opened(self._opening())

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        with self._using() as tier:
            return 0 if tier is None else tier.prefix(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        with self._using() as tier:
            return digests if tier is None else tier.lacking(digests)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        with self._using() as tier:
            return tier is not None and tier.load(digest, into)

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        with self._using() as tier:
            if tier is not None:
                tier.ahead(digests)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        self.open()
        with self._using() as tier:
            return [] if tier is None else tier.store(blocks)

    def evict(self, digests: Iterable[BlockHash]) -> int:
        with self._using() as tier:
            return 0 if tier is None else tier.evict(digests)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        with self._using() as tier:
            return 0 if tier is None else tier.mark(digests, standing, expected=expected, session=session)

    def figures(self) -> TierFigures:
        with self._using() as tier:
            if tier is None:
                return replace(self._figures, blocks=0, used_bytes=0)
            self._figures = tier.figures()
            return self._figures

    def check_integrity(self) -> None:
        with self._using() as tier:
            if tier is not None:
                tier.check_integrity()

    def close(self) -> None:
        self._closed = True
        opened = self._opened
        if opened is not None:
            self._leave(opened)

    @contextlib.contextmanager
    def _using(self) -> Iterator[Tier | None]:
        with self._lock:
            opened = self._opened
            if opened is not None:
                opened.calls += 1
        if opened is None:
            yield None
            return
        try:
            yield opened.tier
        except TierGone:
            self._leave(opened)
            raise
        finally:
            with self._lock:
                opened.calls -= 1
            self._close_if_left(opened)

    def _leave(self, opened: _Opened) -> None:
        with self._lock:
            opened.is_left = True
            if self._opened is opened:
                self._opened = None
        self._close_if_left(opened)

    def _close_if_left(self, opened: _Opened) -> None:
        # Nobody is in the middle of a call: descriptors that are closed may be other files' a moment later.
        with self._lock:
            if not opened.is_left or opened.calls:
                return
            opened.is_left = False
        opened.tier.close()
