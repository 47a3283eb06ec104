"""How likely blocks that lie unused for a while are still to be asked for: learned from the gaps between turns of sessions."""

from __future__ import annotations

import math

_FIRST = 0.25
_BUCKETS = 20
_MAX_WEIGHT = 4096.0


class ReuseModel:
    """A histogram of the seconds after which sessions come back, in powers of two, old ones counting less.

    Every turn is a promise that its session comes back or not; those that came back are in the histogram, and of the others it
    is not known. So the estimate is low for young gateways, and that is the safe side: it then changes nothing.
    """

    def __init__(self) -> None:
        self._turns = 0.0
        self._returns = [0.0] * _BUCKETS
        self._later = [0.0] * (_BUCKETS + 1)
        self._summed = True

    def turn(self, gap: float | None) -> None:
        """A turn came, `gap` seconds after its predecessor (None: it is a session's first, or that was forgotten)."""
        self._turns += 1.0
        if gap is not None:
            self._returns[_bucket(gap)] += 1.0
        if self._turns > _MAX_WEIGHT:
            self._turns *= 0.5
            self._returns = [0.5 * count for count in self._returns]
        self._summed = False

    def probability(self, age: float) -> float:
        """That a block which nobody has used for `age` seconds will be used again."""
        if not self._summed:
            self._sum()
        later = self._later[_bucket(age) + 1]
        never = self._turns - self._later[0]
        return later / (later + never) if later else 0.0

    def _sum(self) -> None:
        """Every turn changes the histogram; it is asked for only where memory is full."""
        total = 0.0
        for bucket in range(_BUCKETS - 1, -1, -1):
            total += self._returns[bucket]
            self._later[bucket] = total
        self._summed = True


def _bucket(seconds: float) -> int:
    if seconds <= _FIRST:
        return 0
    return min(int(math.log2(seconds / _FIRST)) + 1, _BUCKETS - 1)
