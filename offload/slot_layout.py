"""The shared table of a tier, as memory: a header and one column for each fact about a slot.

Columns, not records: the eviction order and the repair after a crash look at one fact of all slots at once, with NumPy. Single
values are read and written through memoryviews of the same memory, which costs a tenth of a NumPy scalar.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = int.from_bytes(b"TKSLOT\x00\x02", "little")
"""Changes with the layout and with what a checksum is of, so that no process reads a table of another version."""

HEADER_BYTES = 4096
PAGE = 4096

FREE, WRITING, READY = 0, 1, 2

# Words of the header, 8 bytes each.
H_MAGIC, H_SLOTS, H_SLOT_BYTES, H_KEY_LOW, H_KEY_HIGH, H_BUCKETS = 0, 1, 2, 3, 4, 5
H_DIRTY = 8  # member + 1 while somebody changes the table
H_CHANGES = 9  # counts changes of what can be found
H_USABLE = 10  # slots whose memory or disk is there; the others come when they are needed
H_USED_BYTES = 11
H_STORED, H_EVICTED, H_HEALED, H_RECLAIMED, H_REBUILT = 16, 17, 18, 19, 20

_COLUMNS = (
    ("low", "Q"),
    ("high", "Q"),
    ("checksum", "Q"),
    ("stamp", "Q"),
    ("last_used", "d"),
    ("expected", "d"),
    ("generation", "I"),
    ("length", "I"),
    ("next", "I"),
    ("owner", "I"),
    ("session", "I"),
    ("depth", "I"),
    ("state", "B"),
    ("standing", "B"),
)
_NUMPY = {"Q": np.uint64, "d": np.float64, "I": np.uint32, "B": np.uint8}
_SIZE = {"Q": 8, "d": 8, "I": 4, "B": 1}


def bucket_count(slots: int) -> int:
    """A power of two of at least `slots`."""
    return 1 << max(4, (slots - 1).bit_length())


def table_bytes(slots: int) -> int:
    """What header and columns take, in whole pages."""
    total = HEADER_BYTES + 4 * bucket_count(slots)
    for _, kind in _COLUMNS:
        total += -(-slots * _SIZE[kind] // 64) * 64
    return -(-total // PAGE) * PAGE


class SlotColumns:
    """Views of a table that lies at the beginning of `memory`. `low` and `high` are the halves of a block's digest.

    `header`, and `at_NAME` for each column: memoryviews, for single values. `NAME`: NumPy arrays, for all of them.
    """

    def __init__(self, memory: mmap.mmap | bytes, slots: int) -> None:
        whole: memoryview[Any] = memoryview(memory)
        self.slots = slots
        self.buckets = bucket_count(slots)
        self.header = whole[:HEADER_BYTES].cast("Q")
        at = HEADER_BYTES
        self.at_heads = whole[at : at + 4 * self.buckets].cast("I")
        self.heads: npt.NDArray[np.uint32] = np.frombuffer(self.at_heads, dtype=np.uint32)
        at += 4 * self.buckets
        views: dict[str, Any] = {}
        for name, kind in _COLUMNS:
            column_bytes: Any = whole[at : at + slots * _SIZE[kind]]
            views[name] = column_bytes.cast(kind)
            at += -(-slots * _SIZE[kind] // 64) * 64
        self.at_low, self.at_high, self.at_checksum = views["low"], views["high"], views["checksum"]
        self.at_generation, self.at_length, self.at_next = views["generation"], views["length"], views["next"]
        self.at_owner, self.at_state, self.at_stamp = views["owner"], views["state"], views["stamp"]
        self.at_last_used: memoryview[float] = views["last_used"]
        self.at_expected: memoryview[float] = views["expected"]
        self.at_session, self.at_depth, self.at_standing = views["session"], views["depth"], views["standing"]

        def column(name: str, kind: str) -> npt.NDArray[np.generic]:
            return np.frombuffer(views[name], dtype=_NUMPY[kind])

        kinds = dict(_COLUMNS)
        columns = {name: column(name, kinds[name]) for name in kinds}
        self.low: npt.NDArray[np.uint64] = columns["low"].view(np.uint64)
        self.high: npt.NDArray[np.uint64] = columns["high"].view(np.uint64)
        self.stamp: npt.NDArray[np.uint64] = columns["stamp"].view(np.uint64)
        self.checksum: npt.NDArray[np.uint64] = columns["checksum"].view(np.uint64)
        self.last_used: npt.NDArray[np.float64] = columns["last_used"].view(np.float64)
        self.expected: npt.NDArray[np.float64] = columns["expected"].view(np.float64)
        self.generation: npt.NDArray[np.uint32] = columns["generation"].view(np.uint32)
        self.length: npt.NDArray[np.uint32] = columns["length"].view(np.uint32)
        self.next: npt.NDArray[np.uint32] = columns["next"].view(np.uint32)
        self.owner: npt.NDArray[np.uint32] = columns["owner"].view(np.uint32)
        self.session: npt.NDArray[np.uint32] = columns["session"].view(np.uint32)
        self.depth: npt.NDArray[np.uint32] = columns["depth"].view(np.uint32)
        self.state: npt.NDArray[np.uint8] = columns["state"].view(np.uint8)
        self.standing: npt.NDArray[np.uint8] = columns["standing"].view(np.uint8)

    def clear(self, key: tuple[int, int], slot_bytes: int) -> None:
        """Makes a fresh table. The magic comes last: what was cut short is no table."""
        self.header[H_MAGIC] = 0
        self.heads[:] = 0
        for column in (self.low, self.high, self.stamp, self.generation, self.length, self.next, self.owner):
            column[:] = 0
        for flags in (self.state, self.standing):
            flags[:] = FREE
        for word in range(1, HEADER_BYTES // 8):
            self.header[word] = 0
        self.header[H_SLOTS], self.header[H_SLOT_BYTES] = self.slots, slot_bytes
        self.header[H_KEY_LOW], self.header[H_KEY_HIGH] = key
        self.header[H_BUCKETS] = self.buckets
        self.header[H_MAGIC] = MAGIC
