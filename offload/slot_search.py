"""Finding many blocks in a shared table at once.

A session of 100k tokens has thousands of blocks, and every turn asks tiers for them and marks them again: one by one that takes
as long as a step of the engine, and holds up all threads of the interpreter meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from offload.slot_layout import READY, SlotColumns
from prefix_cache.hashing import BlockHash, as_joined

NOWHERE = -1

_Words = npt.NDArray[np.uint64]


def find_slots(columns: SlotColumns, digests: Sequence[BlockHash], slot_bytes: int, longest: int) -> npt.NDArray[np.intp]:
    """[digests]: the slots in which blocks lie, or NOWHERE. All chains are followed side by side, `longest` steps at most.

    Needs no lock: as with one block, some may be missed while others change the table, and none is invented."""
    halves: _Words = np.frombuffer(as_joined(digests).joined, dtype="<u8").reshape(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    found = np.full(len(halves), NOWHERE, dtype=np.intp)
    left = np.arange(len(halves))
    slots = columns.heads[(low & np.uint64(columns.buckets - 1)).astype(np.intp)].astype(np.intp) - 1
    for _ in range(longest):
        goes_on = (slots >= 0) & (slots < columns.slots)
        left, slots = left[goes_on], slots[goes_on]
        if not len(left):
            break
        right = (columns.low[slots] == low[left]) & (columns.high[slots] == high[left]) & (columns.state[slots] == READY)
        whole = right & (columns.length[slots] <= slot_bytes)
        found[left[whole]] = slots[whole]
        left, slots = left[~right], columns.next[slots[~right]].astype(np.intp) - 1
    return found
