"""What a stored block is worth: the order in which a tier gives blocks up.

Superseded ones (a rewritten history, a closed session) go first, then those of idle sessions, least recently used first, then
those of sessions that wait for a tool, the latest predicted return first, and prefixes that several sessions share last but for
pinned ones. Within one session the tail goes before the head, since only a prefix can be found again. After KVFlow (arXiv
2507.07400): by the time to the next use, not by recency.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.slot_layout import SlotColumns
from prefix_cache.worth import IDLE, PINNED, SHARED, WAITING

_TAIL = 1e-6  # seconds by which a block counts as older than the one before it


def first_to_go(columns: SlotColumns, slots: npt.NDArray[np.intp], count: int, now: float) -> npt.NDArray[np.intp]:
    """`count` of `slots` (all of them where there are fewer), those that are worth least. `now` on the clock of `last_used`."""
    if count >= len(slots):
        return slots
    standing = columns.standing[slots]
    expected = columns.expected[slots]
    used = columns.last_used[slots]
    tail = columns.depth[slots] * _TAIL
    # A wait, or a pin, that is over by as much again as was foreseen counts for nothing any more.
    overdue = (standing >= WAITING) & (standing != SHARED) & (now > expected + np.maximum(expected - used, 1.0))
    standing = np.where(overdue, IDLE, standing)
    value = np.where(standing == WAITING, -np.abs(expected - now), used) - tail
    chosen: list[npt.NDArray[np.intp]] = []
    for rank in range(PINNED + 1):
        at = np.flatnonzero(standing == rank)
        if len(at) >= count:
            order = np.argpartition(value[at], count - 1)[:count] if count < len(at) else slice(None)
            chosen.append(slots[at[order]])
            break
        chosen.append(slots[at])
        count -= len(at)
    return np.concatenate(chosen)
