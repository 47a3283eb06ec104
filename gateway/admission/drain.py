"""How fast waiting turns get their turn, and so when there will be room again."""

from __future__ import annotations

import math


class DrainMeter:
    """Tokens of work granted per second of waiting: both fade alike, so that it follows the load and idle time counts for
    nothing. `half_life`: seconds of waiting after which an observation counts half."""

    def __init__(self, half_life: float = 20.0) -> None:
        self._half_life = half_life
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def waiting(self, is_waiting: bool, now: float) -> None:
        """Says whether somebody waits from now on."""
        self._advance(now)
        self._since = now if is_waiting else None

    def granted(self, cost: float, now: float) -> None:
        """A turn that had to wait may go."""
        self._advance(now)
        self._tokens += cost

    def seconds(self, cost: float, now: float) -> float | None:
        """How long this much work takes to be granted; None while nothing is known."""
        self._advance(now)
        if self._tokens <= 0 or self._seconds <= 0:
            return None
        return cost * self._seconds / self._tokens

    def _advance(self, now: float) -> None:
        if self._since is None:
            return
        passed = max(now - self._since, 0.0)
        self._since = now
        fade = math.exp2(-passed / self._half_life)
        self._tokens *= fade
        self._seconds = self._seconds * fade + passed
