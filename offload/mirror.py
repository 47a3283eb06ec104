"""What a replica has told the world about a shared tier, and what has changed since.

All replicas change the table; each of them tells its own subscribers, since what one has stored all can load. The table stamps
every change, so looking for changes costs one comparison over its slots, and nothing when there are none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.slot_layout import READY
from offload.slot_table import SlotTable
from prefix_cache.events import BlocksRemoved, BlocksStored, KVEvent

_Books = tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]


class TierMirror:
    """Use from one thread, but for `snapshot` and `follow`."""

    def __init__(self, table: SlotTable | None, tier: str) -> None:
        """table: None as long as there is none."""
        self.tier = tier
        self._next: SlotTable | None = None
        self._begin(table)

    def follow(self, table: SlotTable) -> None:
        """From the next `poll` on another table, in which nothing may be of what the last one had."""
        self._next = table

    def _begin(self, table: SlotTable | None) -> None:
        slots = 0 if table is None else table.slots
        self._table = table
        self._seen = 0
        # Digests by slot, and where they are those of blocks that are there: one value, since others look at them too.
        self._books: _Books = np.zeros((slots, 2), dtype=np.uint64), np.zeros(slots, dtype=bool)

    @property
    def is_behind(self) -> bool:
        """True when `poll` would look."""
        return self._next is not None or (self._table is not None and self._table.changes != self._seen)

    def poll(self) -> list[KVEvent]:
        """What has changed since the last call. Stored blocks have no parent here: the tier does not know it."""
        events: list[KVEvent] = []
        following, self._next = self._next, None
        if following is not None:
            gone = self.snapshot()
            if gone:
                events.append(BlocksRemoved(gone, self.tier))
            self._begin(following)
        if self._table is None:
            return events
        changes = self._table.changes
        if changes == self._seen:
            return events
        columns = self._table.columns
        slots = np.flatnonzero(columns.stamp > self._seen)
        generation = columns.generation[slots].copy()
        ready = columns.state[slots] == READY
        digests = np.stack((columns.low[slots], columns.high[slots]), axis=1)
        # Whose slot was taken meanwhile is stamped again, and looked at then.
        steady = (columns.generation[slots] == generation) & ((columns.state[slots] == READY) == ready)
        self._seen = changes
        slots, ready, digests = slots[steady], ready[steady], digests[steady]
        known, is_held = self._books
        held = is_held[slots]
        same = ready & held & (digests == known[slots]).all(axis=1)
        removed = known[slots[held & ~same]].tobytes()
        stored = digests[ready & ~same].tobytes()
        is_held[slots] = ready
        known[slots[ready]] = digests[ready]
        if removed:
            events.append(BlocksRemoved(removed, self.tier))
        if stored:
            events.append(BlocksStored(stored, b"", self.tier))
        return events

    def snapshot(self) -> bytes:
        """Joined digests of all that was reported as stored and not as removed."""
        known, held = self._books
        return known[held.copy()].tobytes()
