"""Numbers measured many times, summarised in bounded memory."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable

import numpy as np

MAX_KEPT = 1_000_000


class Samples:
    """Count, mean and standard deviation are exact; percentiles too, up to `max_kept` samples.

    Beyond, they are those of a uniform random sample of that size (Vitter, Algorithm R, 1985), drawn with a fixed seed.
    """

    __slots__ = ("_kept", "_max_kept", "_mean", "_random", "_squares", "count")

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.count = 0
        self._kept = array("d")
        self._max_kept = max_kept
        self._mean = 0.0
        self._squares = 0.0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self.count += 1
        # Welford (1962): no cancellation however many.
        delta = value - self._mean
        self._mean += delta / self.count
        self._squares += delta * (value - self._mean)
        if len(self._kept) < self._max_kept:
            self._kept.append(value)
        elif (place := self._random.randrange(self.count)) < self._max_kept:
            self._kept[place] = value

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    @property
    def mean(self) -> float:
        """0 without samples, like every other figure here."""
        return self._mean

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def percentile(self, q: float) -> float:
        """By linear interpolation between the nearest ranks, as numpy does; `q` in [0, 100]."""
        return float(np.percentile(np.frombuffer(self._kept, dtype=np.float64), q)) if self._kept else 0.0
