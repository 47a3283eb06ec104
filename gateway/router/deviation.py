"""How far one worker differs from its peers in something noisy, as far as noise does not explain it."""

from __future__ import annotations

import math

_GAIN = 0.05
_MAX_WEIGHT = 40.0  # as many observations as a mean with this gain remembers
_FIRST_WEIGHT, _FIRST_VARIANCE = 3.0, 0.25  # what is supposed of the noise before much was seen
_SURE = 3.0
_MOST = 5.0


class Crowd:
    """How many recent observations all workers together have."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 0.0


class Deviation:
    """The running mean of log(this worker / all workers), and what of it is believed. What others have not shown to be
    otherwise there is no property of this one.

    A mean within `_SURE` standard errors of zero is none, one far beyond them is believed nearly whole: the positive part of
    Stein's rule (James and Stein 1961; Breiman's non-negative garrote 1995). On a busy machine one first token takes ten times
    as long as the next, whoever computes it; a session must not move for that.
    """

    __slots__ = ("_crowd", "_mean", "_variance", "_weight")

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._mean = self._variance = self._weight = 0.0

    def add(self, seen: float, expected: float, age: float = 1.0) -> None:
        """Both positive. `age`: what earlier observations still count, from 0 to 1."""
        value = max(-_MOST, min(math.log(seen / expected), _MOST))
        self._crowd.weight -= self._weight
        self._weight = min(self._weight * age + 1.0, _MAX_WEIGHT)
        self._crowd.weight += self._weight
        gain = max(1.0 / self._weight, _GAIN)
        step = value - self._mean
        self._mean += gain * step
        self._variance += gain * (step * (value - self._mean) - self._variance)

    def factor(self, age: float = 1.0) -> float:
        """How many times as much as its peers; 1 where noise may be all there is."""
        weight = self._weight * age
        others = min(self._crowd.weight - self._weight, _MAX_WEIGHT)
        if weight <= 0.0 or others <= 0.0 or self._mean == 0.0:
            return 1.0
        variance = (weight * self._variance + _FIRST_WEIGHT * _FIRST_VARIANCE) / (weight + _FIRST_WEIGHT)
        doubt = _SURE**2 * variance * (1.0 / weight + 1.0 / others)
        return math.exp(self._mean * max(0.0, 1.0 - doubt / self._mean**2))

    def forget(self) -> None:
        """The worker is gone: what it said is none of the others' any more."""
        self._crowd.weight -= self._weight
        self._weight = 0.0
