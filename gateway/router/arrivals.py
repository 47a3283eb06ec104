"""How many turns come a second."""

from __future__ import annotations

import math


class Arrivals:
    """A count that halves every `half_life` seconds, and the rate that it means. Seconds are the caller's."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._count = 0.0
        self._at: float | None = None
        self._first = 0.0

    def add(self, now: float) -> None:
        """A turn has come."""
        if self._at is None:
            self._first = now
        self._count = self._decayed(now) + 1.0
        self._at = now

    def rate(self, now: float) -> float:
        """Turns a second; 0 until some time has passed since the first."""
        if self._at is None or now <= self._first:
            return 0.0
        # What a steady rate of one a second would have counted by now; never less than a second's worth.
        mean_life = self._half_life / math.log(2)
        seen = mean_life * (1.0 - math.exp(-(now - self._first) / mean_life))
        return self._decayed(now) / max(seen, 1.0)

    def _decayed(self, now: float) -> float:
        return 0.0 if self._at is None else self._count * math.exp2(-max(now - self._at, 0.0) / self._half_life)
