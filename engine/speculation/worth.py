"""Whether drafting pays: tokens a second of steps with drafts, and of steps without."""

from __future__ import annotations

_HALF_LIFE = 64
"""Steps after which what was seen counts half."""

_ENOUGH = 8
"""Steps that must have been seen of a kind before it is judged."""

_LOOK_EVERY = 64
"""Steps with drafts after which one goes without, to know what that gives."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 64, 4096


class _Rate:
    def __init__(self) -> None:
        self.steps = self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        decay = 0.5 ** (1 / _HALF_LIFE)
        self.steps = self.steps * decay + 1
        self.tokens = self.tokens * decay + tokens
        self.seconds = self.seconds * decay + seconds

    @property
    def known(self) -> bool:
        return self.steps >= _ENOUGH and self.seconds > 0

    @property
    def value(self) -> float:
        return self.tokens / self.seconds


class Worth:
    """Compares the two, for one number of running sequences. Drafts, their verification and their acceptance all count as what
    they are: time and tokens. While drafting does not pay it pauses, each time twice as long, and is then tried again."""

    def __init__(self) -> None:
        self._with, self._without = _Rate(), _Rate()
        self._pause = 0
        self._next_pause = _SHORTEST_PAUSE
        self._since_look = 0
        self._trial = 0  # steps with drafts since the last pause

    def wants(self) -> bool:
        """Whether the next step should draft."""
        if self._pause:
            self._pause -= 1
            return False
        if not self._without.known:
            return False
        self._since_look += 1
        if self._since_look >= _LOOK_EVERY:
            self._since_look = 0
            return False
        return True

    def stepped(self, seconds: float, tokens: int, *, drafted: bool) -> None:
        """A step that only decoded gave `tokens` in `seconds`."""
        (self._with if drafted else self._without).add(tokens, seconds)
        if not drafted:
            return
        self._trial += 1
        if self._trial < _ENOUGH or not (self._with.known and self._without.known):
            return
        if self._with.value < self._without.value:
            self._pause, self._trial = self._next_pause, 0
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            self._with = _Rate()
        else:
            self._next_pause = _SHORTEST_PAUSE
