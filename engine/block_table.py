"""A sequence's block table: the pool's books and the step's batch both want it as an array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefix_cache.eviction import BlockIds

_LEAST = 8


class BlockTable:
    """Block i holds the tokens [i * block_size, (i + 1) * block_size) of a sequence. The array grows by doubling, so that a
    step over a long context copies it once, and nobody makes thousands of Python integers."""

    __slots__ = ("_array", "_length")

    def __init__(self) -> None:
        self._array = np.zeros(_LEAST, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self.array[index])

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """int32 [blocks], in the order of the sequence: a view, not to be changed."""
        return self._array[: self._length]

    def part(self, start: int, stop: int | None = None) -> list[int]:
        """Blocks `start` to `stop` - 1, or to the last."""
        blocks: list[int] = self.array[start:stop].tolist()
        return blocks

    def extend(self, blocks: BlockIds) -> None:
        """Appends blocks."""
        start = self._length
        self._length += len(blocks)
        if self._length > len(self._array):
            grown = np.zeros(max(self._length, 2 * len(self._array)), dtype=np.int32)
            grown[:start] = self._array[:start]
            self._array = grown
        self._array[start : self._length] = blocks

    def replace(self, start: int, blocks: BlockIds) -> None:
        """Puts blocks in place of as many, from index `start` on."""
        self.array[start : start + len(blocks)] = blocks

    def cut(self, length: int) -> npt.NDArray[np.int32]:
        """Keeps the first `length` blocks and returns the others."""
        rest = self.array[length:].copy()
        self._length -= len(rest)
        return rest

    def take(self) -> npt.NDArray[np.int32]:
        """Empties the table and returns what it held."""
        blocks = self.array
        self._array = np.zeros(_LEAST, dtype=np.int32)
        self._length = 0
        return blocks
