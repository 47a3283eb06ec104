"""The way to a worker and back: what a first token takes beyond what the worker says it did."""

from __future__ import annotations

import math

_GAIN = 0.05
_LEAST = 1e-3  # seconds: differences below do not count
_MOST = 10.0


class Way:
    """Seconds of it, the running geometric mean over all workers: now and then one takes long because this machine is busy."""

    __slots__ = ("_mean", "_seen", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mean = math.log(_LEAST)
        self._seen = 0

    def compared(self, seconds: float) -> tuple[float, float]:
        """An observation and what was to be expected, both positive: for the ratio of a worker to its peers."""
        return _bounded(seconds), math.exp(self._mean)

    def add(self, seconds: float) -> None:
        """An observation. It may be less than nothing: clocks differ."""
        if not math.isfinite(seconds):
            return
        self._seen += 1
        self._mean += max(1.0 / self._seen, _GAIN) * (math.log(_bounded(seconds)) - self._mean)
        self.seconds = math.exp(self._mean) - _LEAST

    def scaled(self, factor: float) -> float:
        """Seconds to a worker that is this many times as far away."""
        return max(0.0, (self.seconds + _LEAST) * factor - _LEAST)


def _bounded(seconds: float) -> float:
    return _LEAST + max(0.0, min(seconds, _MOST))
