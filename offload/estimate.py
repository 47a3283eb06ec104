"""What loading a block takes, what computing it takes, and where to stop loading.

Both are measured all the time. A prompt's known blocks are loaded up to the best split point: each block is worth what
computing it at its depth would take, less what loading it takes; blocks can only be loaded from the first one on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_MEMORY = 0.9  # of what was measured before, per measurement
_FORGETTING = 60.0
_MARGIN = 0.95


class TransferCost:
    """Seconds a block takes, a running mean. What was not measured for a while is believed less and less, so that a medium
    that was slow once is tried again."""

    def __init__(self, first_guess: float, clock: Callable[[], float] = time.monotonic) -> None:
        """first_guess: seconds a block takes, before anything was measured."""
        self._guess = first_guess
        self._mean = first_guess
        self._measured_at: float | None = None
        self._clock = clock

    @property
    def seconds(self) -> float:
        """Seconds a block takes."""
        if self._measured_at is None:
            return self._guess
        trust = 0.5 ** ((self._clock() - self._measured_at) / _FORGETTING)
        # Only towards the better: what was found to be fast stays that.
        return self._mean if self._mean <= self._guess else self._guess + (self._mean - self._guess) * trust

    def took(self, blocks: int, seconds: float) -> None:
        """`blocks` took `seconds`."""
        if blocks < 1:
            return
        each = seconds / blocks
        memory = 0.0 if self._measured_at is None else _MEMORY**blocks
        self._mean = self._mean * memory + each * (1 - memory)
        self._measured_at = self._clock()


class PrefillCost:
    """Seconds of computing `new` tokens after `context` others: b * new + c * new * (context + new / 2), fitted by least
    squares over the steps that computed prompts, old ones weighing less."""

    _DECAY = 0.98

    def __init__(self, per_token: float = 5e-4, per_pair: float = 1e-8) -> None:
        """What is believed before anything was measured."""
        self._guess = np.array([per_token, per_pair])
        self._normal = np.zeros((2, 2))
        self._right = np.zeros(2)
        self._fit = self._guess

    def took(self, pieces: Sequence[tuple[int, int]], seconds: float) -> None:
        """One step computed these (context, new) pieces of prompts."""
        new = float(sum(count for _, count in pieces))
        if new <= 0 or seconds <= 0:
            return
        pairs = float(sum(count * (context + count / 2) for context, count in pieces))
        row = np.array([new, pairs]) / new
        self._normal = self._normal * self._DECAY + np.outer(row, row)
        self._right = self._right * self._DECAY + row * (seconds / new)
        # The guess holds the fit where the measurements say nothing (all at one depth).
        scale = np.array([1e-3, 1e-3 * max(pairs / new, 1.0) ** 2])
        fit = np.linalg.solve(self._normal + np.diag(scale), self._right + scale * self._guess)
        self._fit = np.maximum(fit, 0.0) if fit[0] > 0 else np.array([self._right[0] / self._normal[0, 0], 0.0])

    def seconds(self, context: int, new: int) -> float:
        """Seconds that `new` tokens after `context` others take."""
        return float(self._fit[0] * new + self._fit[1] * new * (context + new / 2))

    def of_blocks(self, first: int, count: int, block_size: int) -> npt.NDArray[np.float64]:
        """float64 [count]: seconds that each of the blocks `first`, `first + 1`, ... takes."""
        context = (first + np.arange(count)) * block_size
        each: npt.NDArray[np.float64] = block_size * (self._fit[0] + self._fit[1] * (context + block_size / 2))
        return each


def split_point(load: Sequence[float], compute: Sequence[float], overhead: float) -> int:
    """How many blocks to load, counted from the first: what saves most. `load` and `compute` are seconds of each block;
    `overhead` what loading takes beside. 0 unless loading is clearly faster than computing the same blocks."""
    if not len(load):
        return 0
    loading = np.cumsum(np.asarray(load, dtype=np.float64)) + overhead
    computing = np.cumsum(np.asarray(compute, dtype=np.float64))
    count = int(np.argmax(computing - loading)) + 1
    return count if loading[count - 1] < _MARGIN * computing[count - 1] else 0
