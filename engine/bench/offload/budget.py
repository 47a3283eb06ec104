"""How long a measurement may take, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY = 10.0


class OutOfTimeError(Exception):
    """What was measured cannot be finished in the time that is left."""


class Budget:
    """Seconds from its making on; None: as long as it takes. `say` is called with what is under way."""

    def __init__(self, seconds: float | None, say: Callable[[str], None]) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._say = say
        self._said_at = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float | None:
        """Seconds that are left; None: no matter how many."""
        return None if self._seconds is None else max(0.0, self._seconds - self.spent)

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def check(self) -> None:
        """Raises OutOfTimeError when it is over."""
        if self.is_over:
            raise OutOfTimeError(f"the budget of {self._seconds:g} s is spent")

    def began(self, what: str) -> None:
        """Says what comes. Raises OutOfTimeError when it is over."""
        self.check()
        self._said_at = time.monotonic()
        self._say(f"{self.spent:6.0f} s  {what}")

    def progress(self, what: str) -> None:
        """Says how far it is, now and then."""
        if time.monotonic() - self._said_at >= _EVERY:
            self._said_at = time.monotonic()
            self._say(f"{self.spent:6.0f} s    {what}")
