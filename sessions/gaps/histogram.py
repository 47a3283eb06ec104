"""Quantiles of durations in fixed memory, the recent past counting most.

A histogram over logarithmic buckets, as in DDSketch (Masson, Rim, Lee: VLDB 2019): every quantile is right within a relative
error, however long the tail. Old values fade by forward decay (Cormode, Shkapenyuk, Srivastava, Xu: ICDE 2009): a value
weighs 2 ** (its time / half-life) when it comes, so that nothing that is stored has to be touched as time passes. Two
histograms are merged by adding buckets, in any order, which is what several gateways need to share one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

MIN_SECONDS = 0.001
MAX_SECONDS = 86_400.0
GAMMA = 1.1
RELATIVE_ERROR = (GAMMA - 1) / (GAMMA + 1)
"""Of quantiles between MIN_SECONDS and MAX_SECONDS; what lies outside counts as the nearer of the two."""

_LOG_GAMMA = math.log(GAMMA)
NUM_BUCKETS = math.ceil(math.log(MAX_SECONDS / MIN_SECONDS) / _LOG_GAMMA) + 1
_REBASE_AT = 2.0**64


def bucket_of(seconds: float) -> int:
    """Bucket i holds (MIN * GAMMA ** (i - 1), MIN * GAMMA ** i]."""
    clamped = min(max(seconds, MIN_SECONDS), MAX_SECONDS)
    return min(NUM_BUCKETS - 1, max(0, math.ceil(math.log(clamped / MIN_SECONDS) / _LOG_GAMMA - 1e-9)))


def bucket_seconds(bucket: int) -> float:
    """The value that stands for a bucket: within RELATIVE_ERROR of all in it."""
    return MIN_SECONDS * 2 * GAMMA**bucket / (GAMMA + 1) if bucket else MIN_SECONDS


class DecayedHistogram:
    """Durations in seconds. Times are those of the caller's clock, in seconds; they may stand still, and steps back count as
    standing still."""

    __slots__ = ("_half_life", "_high", "_landmark", "_latest", "_low", "_weights")

    def __init__(self, half_life: float, now: float) -> None:
        """`half_life`: seconds after which a value weighs half."""
        self._half_life = half_life
        self._landmark = now
        self._latest = now
        self._weights = array("d", bytes(8 * NUM_BUCKETS))
        # The buckets in use are self._weights[low:high]; mostly they are few.
        self._low, self._high = NUM_BUCKETS, 0

    def add(self, seconds: float, now: float, weight: float = 1.0) -> None:
        """Counts a duration `weight` times. Raises ValueError for one that is no finite number."""
        if not math.isfinite(seconds):
            raise ValueError(f"a gap must be a finite number of seconds, not {seconds}")
        factor = self._factor(now)  # before the bucket is read: it may scale all of them
        self._put(bucket_of(seconds), weight * factor)

    def merge(self, buckets: Mapping[int, float], now: float) -> None:
        """Adds what `buckets` of another one says, whose weights are of this moment."""
        factor = self._factor(now)
        for bucket, weight in buckets.items():
            if 0 <= bucket < NUM_BUCKETS and 0 < weight < math.inf:
                self._put(bucket, weight * factor)

    def buckets(self, now: float) -> dict[int, float]:
        """Weights as of now, of the buckets that have any."""
        factor = self._factor(now)
        return {bucket: weight / factor for bucket, weight in enumerate(self._weights) if weight > 0}

    def weight(self, now: float) -> float:
        """How many values it stands for, old ones counted for less."""
        return math.fsum(self._weights[self._low : self._high]) / self._factor(now)

    def quantiles(self, shares: Sequence[float]) -> tuple[float, ...] | None:
        """Durations below which these shares (ascending, 0 to 1) lie; None when it is empty. Independent of the time."""
        weights = self._weights[self._low : self._high]
        return self._quantiles(weights, math.fsum(weights), shares)

    def summary(self, now: float, shares: Sequence[float]) -> tuple[float, tuple[float, ...] | None]:
        """`weight` and `quantiles`."""
        weights = self._weights[self._low : self._high]
        total = math.fsum(weights)
        return total / self._factor(now), self._quantiles(weights, total, shares)

    def _quantiles(self, weights: array[float], total: float, shares: Sequence[float]) -> tuple[float, ...] | None:
        """`weights`: of the buckets from `_low` on, which sum to `total`."""
        low = self._low
        if total <= 0:
            return None
        below = list(accumulate(weights))
        first, last = bisect_right(below, 0.0), bisect_left(below, below[-1])
        # Rounding may leave the last shares a hair above everything there is.
        return tuple([bucket_seconds(low + min(max(bisect_left(below, share * total), first), last)) for share in shares])

    def _put(self, bucket: int, weight: float) -> None:
        self._weights[bucket] += weight
        self._low, self._high = min(self._low, bucket), max(self._high, bucket + 1)

    def _factor(self, now: float) -> float:
        """What a value of this moment weighs."""
        self._latest = max(self._latest, now)
        factor = float(2.0 ** min((self._latest - self._landmark) / self._half_life, 1000.0))
        if factor < _REBASE_AT:
            return factor
        for bucket, weight in enumerate(self._weights):
            self._weights[bucket] = weight / factor
        self._landmark = self._latest
        return 1.0
