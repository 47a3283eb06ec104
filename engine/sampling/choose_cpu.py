"""Choosing on the CPU: one row at a time with NumPy, whose vectorised kernels fit one row into the cache.

Every row is worked on in the same memory layout and by itself, so its outcome cannot depend on other rows, not even by
rounding. `choose_device` says what is computed; this gives the same tokens, by selecting and compacting where a GPU sorts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.sampling.philox import GAMMA, LARGEST_UNIFORM, MIX_MULTIPLIERS, MIX_SHIFTS

Floats = npt.NDArray[np.float32]

_SPARSE = 8
"""Numbers for some tokens cost more each than numbers for all; up to one token in this many they are still cheaper."""


class CPUChooser:
    """Scratch memory for rows of `vocab_size` logits. Not for two threads at once."""

    def __init__(self, vocab_size: int) -> None:
        pairs = (vocab_size + 1) // 2
        self._vocab_size = vocab_size
        self._steps = np.arange(1, pairs + 1, dtype=np.uint64) * np.uint64(GAMMA)
        self._mixed = np.empty(pairs, dtype=np.uint64)
        self._shifted = np.empty(pairs, dtype=np.uint64)
        self._scores = np.empty(vocab_size, dtype=np.float32)
        self._noise = np.empty(vocab_size, dtype=np.float32)

    def choose(
        self, row: Floats, largest: float, key: np.uint64, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int:
        """The token of one row. row: float32 [V], not all -inf, no NaN, no +inf; largest: its maximum; key: its stream key."""
        scores = self._scores
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf, as it should
            np.subtract(row, np.float32(largest), out=scores)
            np.divide(scores, np.float32(temperature), out=scores)
        threshold = self._threshold(top_k, top_p, min_p)
        if threshold == -np.inf:
            return int(np.argmax(np.subtract(scores, self._log_exponential(key), out=self._noise)))
        candidates = np.flatnonzero(scores >= threshold)
        if len(candidates) == 1:
            return int(candidates[0])
        if len(candidates) > self._vocab_size // _SPARSE:
            np.copyto(scores, np.float32(-np.inf), where=scores < threshold)
            return int(np.argmax(np.subtract(scores, self._log_exponential(key), out=self._noise)))
        return int(candidates[np.argmax(scores[candidates] - self._log_exponential_of(key, candidates))])

    def _threshold(self, top_k: int, top_p: float, min_p: float) -> np.float32:
        """The least score that is kept. Scores are 0 at the most likely token."""
        scores = self._scores
        threshold = np.float32(-np.inf) if min_p <= 0.0 else np.float32(math.log(min_p))
        if 0 < top_k < self._vocab_size:
            rank = self._vocab_size - top_k
            threshold = max(threshold, np.partition(scores, rank)[rank])
        if top_p < 1.0:
            threshold = self._nucleus(threshold, top_p)
        return threshold

    def _nucleus(self, threshold: np.float32, top_p: float) -> np.float32:
        """The threshold that also leaves out what top_p leaves out.

        Tokens less likely than (1 - top_p) / V have less than 1 - top_p together, so none of them is in the nucleus: where
        nothing else cuts the vocabulary, only the others are sorted.
        """
        scores = self._scores
        total: float | None = None
        if threshold == -np.inf:
            total = float(np.exp(scores, out=self._noise).sum())
            least = (1.0 - top_p) * total / self._vocab_size * 0.99  # a hundredth less, for rounding
            threshold = np.float32(math.log(least))
        kept = np.compress(scores >= threshold, scores)
        kept.sort()
        cumulative = np.cumsum(np.exp(kept)[::-1], dtype=np.float64)
        if total is None:
            total = float(cumulative[-1])
        before = np.concatenate([[0.0], cumulative[:-1]])
        count = int(np.searchsorted(before, top_p * total, side="left"))
        least_kept: np.float32 = kept[len(kept) - count]
        return least_kept

    def _log_exponential(self, key: np.uint64) -> Floats:
        """float32 [V]: the logarithm of an exponential variate for every token."""
        mixed, shifted = self._mixed, self._shifted
        np.add(self._steps, key, out=mixed)
        _mix(mixed, shifted)
        np.copyto(self._noise, mixed.view(np.uint32)[: self._vocab_size], casting="same_kind")
        return _log_exponential(self._noise)

    def _log_exponential_of(self, key: np.uint64, token_ids: npt.NDArray[np.int64]) -> Floats:
        """float32 [N]: the same numbers for some tokens."""
        mixed = self._steps[token_ids >> 1] + key
        _mix(mixed, np.empty_like(mixed))
        halves = mixed.view(np.uint32)[2 * np.arange(len(token_ids)) + (token_ids & 1)]
        return _log_exponential(halves.astype(np.float32))


def _mix(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, in place."""
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, None), strict=True):
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if multiplier is not None:
            np.multiply(words, np.uint64(multiplier), out=words)


def _log_exponential(words: Floats) -> Floats:
    """In place: 32-bit integers to log(-log(1 - u)) with u = (integer + 1/2) / 2**32.

    u is exact to 24 bits near 0, where the winners of the race come from; near 1 it is kept below 1.
    """
    np.add(words, np.float32(0.5), out=words)
    np.multiply(words, np.float32(2.0**-32), out=words)
    np.minimum(words, np.float32(LARGEST_UNIFORM), out=words)
    np.negative(words, out=words)
    np.log1p(words, out=words)
    np.negative(words, out=words)
    return np.log(words, out=words)
