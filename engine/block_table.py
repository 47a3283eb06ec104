"""A sequence's block table: a list for the pool's books and an array for the step's batch, kept equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTable:
    """Block i holds the tokens [i * block_size, (i + 1) * block_size) of a sequence. The array grows by doubling, so that a
    step over a long context copies it once instead of converting thousands of Python integers."""

    __slots__ = ("_array", "_blocks")

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._array = np.zeros(8, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> int:
        return self._blocks[index]

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks in the order of the sequence; not to be changed."""
        return self._blocks

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """int32 [blocks]: a view."""
        return self._array[: len(self._blocks)]

    def extend(self, blocks: Sequence[int]) -> None:
        """Appends blocks."""
        start = len(self._blocks)
        self._blocks.extend(blocks)
        if len(self._blocks) > len(self._array):
            grown = np.zeros(max(len(self._blocks), 2 * len(self._array)), dtype=np.int32)
            grown[:start] = self._array[:start]
            self._array = grown
        self._array[start : len(self._blocks)] = blocks

    def replace(self, start: int, blocks: Sequence[int]) -> None:
        """Puts blocks in place of as many, from index `start` on."""
        self._blocks[start : start + len(blocks)] = blocks
        self._array[start : start + len(blocks)] = blocks

    def cut(self, length: int) -> list[int]:
        """Keeps the first `length` blocks and returns the others."""
        rest = self._blocks[length:]
        del self._blocks[length:]
        return rest

    def take(self) -> list[int]:
        """Empties the table and returns what it held."""
        blocks, self._blocks = self._blocks, []
        return blocks
