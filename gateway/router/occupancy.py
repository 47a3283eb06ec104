"""How much of a worker's KV memory the turns hold that run there, a shared beginning counted once."""

from __future__ import annotations


class Occupancy:
    """Tokens in use by turns in flight. A turn holds its own tokens and, under `key`, the beginning it found there."""

    __slots__ = ("_shared", "tokens")

    def __init__(self) -> None:
        self._shared: dict[bytes, list[int]] = {}
        self.tokens = 0

    def enter(self, key: bytes | None, shared: int, own: int) -> None:
        """A turn that shares `shared` tokens with whoever has the same `key` (None: with nobody) and adds `own`."""
        self.tokens += own
        if key is None:
            self.tokens += shared
            return
        entry = self._shared.setdefault(key, [0, shared])
        entry[0] += 1
        if entry[0] == 1:
            self.tokens += shared

    def leave(self, key: bytes | None, shared: int, own: int) -> None:
        """The same turn has ended. Call with what `enter` was called with, once."""
        self.tokens -= own
        if key is None:
            self.tokens -= shared
            return
        entry = self._shared.get(key)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            self.tokens -= entry[1]
            del self._shared[key]
