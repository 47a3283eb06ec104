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


class TierMirror:
    """Use from one thread, but for `snapshot`."""

    def __init__(self, table: SlotTable, tier: str) -> None:
        self._table = table
        self.tier = tier
        self._seen = 0
        self._known: npt.NDArray[np.uint64] = np.zeros((table.slots, 2), dtype=np.uint64)
        self._held = np.zeros(table.slots, dtype=bool)

    @property
    def is_behind(self) -> bool:
        """True when `poll` would look."""
        return self._table.changes != self._seen

    def poll(self) -> list[KVEvent]:
        """What has changed since the last call. Stored blocks have no parent here: the tier does not know it."""
        changes = self._table.changes
        if changes == self._seen:
            return []
        columns = self._table.columns
        slots = np.flatnonzero(columns.stamp > self._seen)
        generation = columns.generation[slots].copy()
        ready = columns.state[slots] == READY
        digests = np.stack((columns.low[slots], columns.high[slots]), axis=1)
        # Whose slot was taken meanwhile is stamped again, and looked at then.
        steady = (columns.generation[slots] == generation) & ((columns.state[slots] == READY) == ready)
        self._seen = changes
        slots, ready, digests = slots[steady], ready[steady], digests[steady]
        held = self._held[slots]
        same = ready & held & (digests == self._known[slots]).all(axis=1)
        removed = self._known[slots[held & ~same]].tobytes()
        stored = digests[ready & ~same].tobytes()
        self._held[slots] = ready
        self._known[slots[ready]] = digests[ready]
        events: list[KVEvent] = []
        if removed:
            events.append(BlocksRemoved(removed, self.tier))
        if stored:
            events.append(BlocksStored(stored, b"", self.tier))
        return events

    def snapshot(self) -> bytes:
        """Joined digests of all that was reported as stored and not as removed."""
        held = self._held.copy()
        return self._known[held].tobytes()
