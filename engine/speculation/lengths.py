"""How many tokens to draft for a sequence, by what became of the last drafts."""

from __future__ import annotations

_FIRST = 4
_LONGEST_PAUSE = 64


class DraftLength:
    """Grows while drafts are accepted whole, shrinks to what was accepted, and pauses, for longer each time, while nothing is.

    A rejected draft costs a larger pass and gains nothing; text that does not repeat itself soon pays for a try in 64.
    """

    __slots__ = ("_limit", "_longest", "_misses", "_pause")

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._limit = min(_FIRST, longest)
        self._misses = 0
        self._pause = 0

    def next(self) -> int:
        """Tokens to draft now; 0: none. Counts a pause down."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._limit

    def verified(self, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` (at least one) were what the model chose."""
        if accepted:
            self._misses = self._pause = 0
            longer = max(self._limit, 2 * drafted) if accepted == drafted else accepted + 1
            self._limit = min(longer, self._longest)
        else:
            self._misses += 1
            self._limit = max(1, self._limit // 2)
            self._pause = min(2**self._misses, _LONGEST_PAUSE)
