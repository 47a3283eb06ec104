"""A request's body in the pieces that came: joined only where somebody needs the whole."""

from __future__ import annotations

from itertools import chain

_MAX_PIECES = 256


class BodyPieces:
    """Bytes in the order in which they came. Very many pieces, which would take more than their text, are put together."""

    __slots__ = ("_crumbs", "_pieces", "size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._crumbs = bytearray()
        self.size = 0
        """Bytes that came."""

    def add(self, piece: bytes) -> None:
        if len(self._pieces) < _MAX_PIECES:
            self._pieces.append(piece)
        else:
            self._crumbs += piece
        self.size += len(piece)

    def whole(self) -> bytes:
        """All of it."""
        if self._crumbs or len(self._pieces) != 1:
            self._pieces = [b"".join((*self._pieces, self._crumbs))]
            self._crumbs = bytearray()
        return self._pieces[0]

    def part(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, of which there may be fewer; what lies outside is not copied."""
        found: list[bytes] = []
        at = 0
        for piece in chain(self._pieces, (self._crumbs,) if self._crumbs else ()):
            if at >= end:
                break
            behind = at + len(piece)
            if behind > start:
                found.append(bytes(piece[max(start - at, 0) : end - at]))
            at = behind
        return found[0] if len(found) == 1 else b"".join(found)
