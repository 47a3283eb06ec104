"""What is known of blocks beside their place in an order: who has marked them, and what those in use will be worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefix_cache.runs import BlockArray

_UNMARKED = -1


@dataclass(frozen=True, slots=True)
class Mark:
    """What blocks are worth: prefix_cache.worth. `until`: when it means nothing any more."""

    standing: int
    expected: float
    until: float


class Marks:
    """Arrays over block ids."""

    def __init__(self) -> None:
        self._sessions: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._shared: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._standing: npt.NDArray[np.int8] = np.zeros(0, dtype=np.int8)
        self._expected: npt.NDArray[np.float64] = np.zeros(0)
        self._until: npt.NDArray[np.float64] = np.zeros(0)

    def grow(self, size: int) -> None:
        """Room for `size` blocks."""
        more = size - len(self._sessions)
        self._sessions = np.concatenate((self._sessions, np.zeros(more, dtype=np.int64)))
        self._shared = np.concatenate((self._shared, np.zeros(more, dtype=np.bool_)))
        self._standing = np.concatenate((self._standing, np.full(more, _UNMARKED, dtype=np.int8)))
        self._expected = np.concatenate((self._expected, np.zeros(more)))
        self._until = np.concatenate((self._until, np.zeros(more)))

    def says(self, blocks: BlockArray, session: int) -> None:
        """`session` has marked these."""
        before = self._sessions[blocks]
        others = (before != session) & (before != 0)
        if others.any():
            self._shared[blocks[others]] = True
        self._sessions[blocks] = session

    def shared(self, blocks: BlockArray) -> npt.NDArray[np.bool_]:
        """Which of these several sessions have marked."""
        return self._shared[blocks]

    def foresee(self, blocks: BlockArray, mark: Mark) -> None:
        """What these will be worth once nobody uses them."""
        self._standing[blocks] = mark.standing
        self._expected[blocks] = mark.expected
        self._until[blocks] = mark.until

    def foreseen(self, blocks: BlockArray, otherwise: Mark) -> Iterator[tuple[BlockArray, Mark]]:
        """`blocks` in stretches that are worth the same, as was foreseen, which is over with it; or `otherwise`."""
        standing = self._standing[blocks]
        if (standing == _UNMARKED).all():
            yield blocks, otherwise
            return
        marked = standing != _UNMARKED
        expected, until = np.where(marked, self._expected[blocks], 0.0), np.where(marked, self._until[blocks], 0.0)
        self._standing[blocks] = _UNMARKED
        differ = (standing[1:] != standing[:-1]) | (expected[1:] != expected[:-1]) | (until[1:] != until[:-1])
        bounds = [0, *(np.flatnonzero(differ) + 1).tolist(), len(blocks)]
        for start, stop in pairwise(bounds):
            mark = Mark(int(standing[start]), float(expected[start]), float(until[start]))
            yield blocks[start:stop], otherwise if mark.standing == _UNMARKED else mark

    def forget(self, blocks: BlockArray) -> None:
        """These hold something else now."""
        self._sessions[blocks] = 0
        self._shared[blocks] = False
        self._standing[blocks] = _UNMARKED
