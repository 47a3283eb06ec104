"""Runs: blocks that stand one behind the other in an order, and come and go together.

An entry of a run is a block and a stamp. It stands for the block as long as that is the block's newest stamp: so blocks leave
a run without being looked for in it, by being stamped anew or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BlockArray = npt.NDArray[np.intp]
"""[blocks]: block ids."""

_NOWHERE = -1
_LOOKED_AT = 64


@dataclass(slots=True, eq=False)
class Run:
    """`blocks` and their `stamps`, both [entries]; those before `first` are over. `until`: of their mark."""

    blocks: BlockArray
    stamps: npt.NDArray[np.int64]
    until: float
    first: int = 0

    def __len__(self) -> int:
        """Entries that are left, of which some may stand for nothing any more."""
        return len(self.blocks) - self.first


class Stamps:
    """The newest stamp of each block that is in a run."""

    def __init__(self) -> None:
        self._stamps: npt.NDArray[np.int64] = np.full(0, _NOWHERE, dtype=np.int64)
        self._next = 0

    def __len__(self) -> int:
        """Blocks that there is room for: their ids are below it."""
        return len(self._stamps)

    def grow(self, size: int) -> None:
        """Room for `size` blocks."""
        more = np.full(size - len(self._stamps), _NOWHERE, dtype=np.int64)
        self._stamps = np.concatenate((self._stamps, more))

    def run(self, blocks: BlockArray, until: float) -> Run:
        """A new run of these blocks, which leave those they are in. Of a block that is named twice the last entry counts."""
        stamps = np.arange(self._next, self._next + len(blocks), dtype=np.int64)
        self._next += len(blocks)
        self._stamps[blocks] = stamps
        return Run(blocks, stamps, until)

    def are_in(self, blocks: BlockArray) -> npt.NDArray[np.bool_]:
        """Which of the blocks are in a run."""
        there: npt.NDArray[np.bool_] = self._stamps[blocks] != _NOWHERE
        return there

    def take_out(self, blocks: BlockArray) -> None:
        """These are in no run any more."""
        self._stamps[blocks] = _NOWHERE

    def alive(self, run: Run) -> BlockArray:
        """The blocks that are still in it, in order."""
        blocks = run.blocks[run.first :]
        alive: BlockArray = blocks[self._stamps[blocks] == run.stamps[run.first :]]
        return alive

    def draw(self, run: Run, count: int) -> list[int]:
        """Takes out and returns the first `count` blocks of a run, or as many as it has. Afterwards it begins with a block that
        is in it, or has no entries left."""
        drawn: list[int] = []
        while run.first < len(run.blocks):
            stop = run.first + max(count - len(drawn), _LOOKED_AT)
            blocks = run.blocks[run.first : stop]
            alive = np.flatnonzero(self._stamps[blocks] == run.stamps[run.first : stop])
            taken = blocks[alive[: count - len(drawn)]]
            self._stamps[taken] = _NOWHERE
            drawn += taken.tolist()
            if len(taken) < len(alive):
                run.first += int(alive[len(taken)])
                break
            run.first += len(blocks)
        return drawn

    def merged(self, runs: Iterable[Run]) -> list[Run]:
        """One run of all blocks that are still in these, in order, which keep their stamps; none when there are no such."""
        runs = list(runs)
        alive = [self._stamps[run.blocks[run.first :]] == run.stamps[run.first :] for run in runs]
        if not any(map(np.any, alive)):
            return []
        blocks = np.concatenate([run.blocks[run.first :][there] for run, there in zip(runs, alive, strict=True)])
        stamps = np.concatenate([run.stamps[run.first :][there] for run, there in zip(runs, alive, strict=True)])
        return [Run(blocks, stamps, runs[-1].until)]
