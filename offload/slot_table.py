"""Which block lies in which slot: one table in shared memory for all processes of the machine.

Slots are read without a lock. A reader notes a slot's generation, copies what lies there, and asks afterwards whether the
generation is still the same (a seqlock); the checksum, seeded with the block's digest, has the last word, so neither a slot
that was reused meanwhile nor memory that somebody scribbled on is ever taken for the block.

Changes are made under one lock that the kernel takes back when its holder dies (offload.shared_locks). Who changes the table
first writes its name into the header and last takes it out again; whoever finds a name there rebuilds the chains from the
slots, of which each is whole by itself. A slot that is being filled belongs to a member (offload.table_file): what a dead one
had begun is free again once somebody needs a slot or looks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload import slot_layout as layout
from offload.errors import TierCorrupt, TierUnavailable
from offload.slot_layout import FREE, READY, WRITING, SlotColumns
from offload.slot_search import NOWHERE, find_slots
from offload.standing import first_to_go
from offload.table_file import HALVES, TableFile
from prefix_cache.hashing import BlockHash, as_joined
from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING

_LONGEST_CHAIN = 128
_FEW, _MANY = 4, 64
"""Blocks that are looked for one by one, and those that are before all others are."""


class Place(NamedTuple):
    """Where a block lies, or is to be written: what lies in `slot` is that block as long as its generation stays."""

    digest: BlockHash
    slot: int
    generation: int
    length: int = 0
    checksum: int = 0


class SlotTable:
    """Use from any thread. Whatever changes the table may raise TierUnavailable; what only reads never does."""

    def __init__(self, path: Path, key: BlockHash, slots: int, slot_bytes: int, payload: bool = False) -> None:
        """Attaches to the table in the file `path`, or makes it. Of a table that others use the size is theirs.

        key: 16 bytes; a table of another key is not used. payload: the slots' bytes follow in the same file.
        Raises TierUnavailable.
        """
        if slots < 1 or slots >= 1 << 31:
            raise TierUnavailable(
                f"A tier of {slots} blocks cannot be made; give it room for at least one block of {slot_bytes} bytes."
            )
        self.path = path
        self.key = key
        self.slot_bytes = slot_bytes
        self._now: Callable[[], float] = time.monotonic
        try:
            self._file = TableFile(path, key, slots, slot_bytes, payload)
        except OSError as error:
            raise TierUnavailable(f"{path} cannot be used: {error.strerror or error}.") from error
        self.slots = self._file.slots
        self.member = self._file.member
        self.memory = self._file.memory
        self.descriptor = self._file.descriptor
        self.payload_offset = self._file.payload_offset
        self.columns = self._file.columns
        self.is_first = self._file.is_alone
        """Nobody else uses the table: what it says of things outside of memory may be old."""
        if self.is_first and not self._file.is_fresh:
            with self._file.mutex.held():
                self.columns.state[self.columns.state == WRITING] = FREE
                self._rebuild()
        elif not self.is_first:
            # The number may have been a dead member's: what that one had begun would look alive from now on.
            with self._changing() as columns:
                mine = np.flatnonzero((columns.state == WRITING) & (columns.owner == self.member))
                columns.state[mine] = FREE
                columns.header[layout.H_RECLAIMED] += len(mine)

    def close(self, *, keep: bool = False) -> None:
        """Leaves. The last one takes the table along, unless `keep`. Idempotent."""
        self._file.close(keep=keep)

    # Reading, without a lock.

    def find(self, digest: BlockHash) -> Place | None:
        """Where a block lies, None if it is not there. May miss a block while others change the table, never invents one."""
        low, high = HALVES.unpack(digest)
        columns = self.columns
        number = columns.at_heads[low & (columns.buckets - 1)]
        for _ in range(_LONGEST_CHAIN):
            slot = number - 1
            if not 0 <= slot < self.slots:
                return None
            if columns.at_low[slot] == low and columns.at_high[slot] == high and columns.at_state[slot] == READY:
                generation = columns.at_generation[slot]
                length, checksum = columns.at_length[slot], columns.at_checksum[slot]
                if columns.at_low[slot] == low and length <= self.slot_bytes:
                    return Place(digest, slot, generation, length, checksum)
                return None
            number = columns.at_next[slot]
        return None

    def is_still(self, place: Place) -> bool:
        """True when the slot has been that block's all the time since `place` was made."""
        columns = self.columns
        return bool(columns.at_generation[place.slot] == place.generation and columns.at_state[place.slot] == READY)

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        """How many of `digests`, counted from the first, are there."""
        for count in range(min(len(digests), _FEW)):
            if self.find(digests[count]) is None:
                return count
        # Most often none of them is there, or all are.
        start, stop = _FEW, _MANY
        while start < len(digests):
            missing = np.flatnonzero(self._slots_of(digests[start:stop]) == NOWHERE)
            if len(missing):
                return start + int(missing[0])
            start, stop = stop, len(digests)
        return len(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Those of `digests` that are not there, in order."""
        digests = as_joined(digests)
        return digests.where(self._slots_of(digests) == NOWHERE)

    def _slots_of(self, digests: Sequence[BlockHash]) -> npt.NDArray[np.intp]:
        """[digests]: the slots in which they lie, or NOWHERE."""
        return find_slots(self.columns, digests, self.slot_bytes, _LONGEST_CHAIN)

    @property
    def changes(self) -> int:
        """Grows whenever what can be found has changed."""
        return self.columns.header[layout.H_CHANGES]

    def counter(self, word: int) -> int:
        """A counter of the header, over all processes since the table was made."""
        return self.columns.header[word]

    @property
    def used_bytes(self) -> int:
        """What lies in the slots."""
        return self.columns.header[layout.H_USED_BYTES]

    @property
    def members(self) -> int:
        """Processes that use it now, this one among them."""
        return self._file.members

    def count(self, state: int = READY) -> int:
        """How many slots are in a state."""
        return int(np.count_nonzero(self.columns.state == state))

    # Changing.

    @contextlib.contextmanager
    def _changing(self, budget: float | None = None) -> Iterator[SlotColumns]:
        with self._file.mutex.held(budget):
            header = self.columns.header
            if header[layout.H_DIRTY]:
                self._rebuild()
            header[layout.H_DIRTY] = self.member + 1
            # Not in a finally: whoever leaves in the middle leaves a table that must be rebuilt.
            yield self.columns
            header[layout.H_DIRTY] = 0

    def reserve(
        self,
        digests: Sequence[BlockHash],
        *,
        depths: Sequence[int] | None = None,
        session: int = 0,
        grow: Callable[[int], int] | None = None,
        quota: int | None = None,
    ) -> list[Place | None]:
        """Slots to write these blocks into; None for those that are there already or for which there is no room.

        What has to go for them goes. `grow(usable)`: makes more slots usable and returns how many are then; the same
        number when no more are to be had. `quota`: bytes of payload that may be used. `depths`: the blocks' positions in their
        sequence.
        """
        now = self._now()
        places: list[Place | None] = []
        with self._changing() as columns:
            wanted = [digest for digest in digests if self.find(digest) is None]
            slots = iter(self._make_room(len(wanted), now, grow, quota))
            taken = set(wanted)
            for index, digest in enumerate(digests):
                slot = next(slots, None) if digest in taken else None
                if slot is None:
                    places.append(None)
                    continue
                taken.discard(digest)  # named twice, written once
                low, high = HALVES.unpack(digest)
                columns.at_generation[slot] = (columns.at_generation[slot] + 1) & 0xFFFFFFFF
                columns.at_owner[slot] = self.member
                columns.at_state[slot] = WRITING
                columns.at_low[slot], columns.at_high[slot] = low, high
                columns.at_last_used[slot], columns.at_expected[slot] = now, 0.0
                columns.at_session[slot], columns.at_standing[slot] = session, IDLE
                columns.at_depth[slot] = 0 if depths is None else depths[index]
                places.append(Place(digest, slot, columns.at_generation[slot]))
        return places

    def commit(self, places: Iterable[tuple[Place, int, int]]) -> list[Place]:
        """(place, length, checksum) of slots that are written: their blocks can be found from now on. Returns what was taken
        in: not what somebody else stored first, nor what the slot was taken away from meanwhile."""
        stored: list[Place] = []
        with self._changing() as columns:
            header = columns.header
            for place, length, checksum in places:
                slot = place.slot
                if not self._is_mine(place):
                    continue
                if self.find(place.digest) is not None:
                    columns.at_state[slot] = FREE
                    continue
                columns.at_length[slot], columns.at_checksum[slot] = length, checksum
                header[layout.H_CHANGES] += 1
                columns.at_stamp[slot] = header[layout.H_CHANGES]
                columns.at_state[slot] = READY
                self._link(slot)
                header[layout.H_USED_BYTES] += length
                header[layout.H_STORED] += 1
                stored.append(Place(place.digest, slot, place.generation, length, checksum))
        return stored

    def cancel(self, places: Iterable[Place]) -> None:
        """Gives reserved slots back."""
        with self._changing() as columns:
            for place in places:
                if self._is_mine(place):
                    columns.at_state[place.slot] = FREE

    def drop(self, places: Iterable[Place], *, damaged: bool = False) -> list[Place]:
        """Takes blocks out, as far as they are still where `places` say. `damaged`: counted as healed, else as evicted."""
        gone: list[Place] = []
        with self._changing() as columns:
            for place in places:
                if self.is_still(place):
                    self._remove(place.slot)
                    columns.header[layout.H_HEALED if damaged else layout.H_EVICTED] += 1
                    gone.append(place)
        return gone

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        """What blocks are worth from now on (prefix_cache.worth). A block that another session has marked before is shared, and
        stays that. Returns how many were found."""
        now = self._now()
        with self._changing() as columns:
            slots = self._slots_of(digests)
            slots = slots[slots != NOWHERE]
            before = columns.session[slots]
            shared = columns.standing[slots] == SHARED
            if session:
                shared |= (before != 0) & (before != session)
                columns.session[slots] = session
            if standing >= IDLE:
                columns.last_used[slots] = now
            columns.standing[slots] = np.where(shared & (standing != PINNED), SHARED, standing)
            columns.expected[slots] = expected if standing in (WAITING, PINNED) else 0.0
        return len(slots)

    def touch(self, places: Iterable[Place]) -> None:
        """These blocks were used just now. Needs no lock: the worst that a race does is to make another block look used."""
        now = self._now()
        columns = self.columns
        for place in places:
            columns.at_last_used[place.slot] = now
            if columns.at_standing[place.slot] in (SUPERSEDED, WAITING):
                columns.at_standing[place.slot] = IDLE

    def clear(self) -> int:
        """Takes everything out. Returns how many blocks that were."""
        with self._changing() as columns:
            slots = np.flatnonzero(columns.state == READY)
            for slot in slots:
                self._remove(int(slot))
            columns.header[layout.H_EVICTED] += len(slots)
            return len(slots)

    def shrink(self, used_bytes: int) -> list[int]:
        """Gives up blocks, least worth first, until at most `used_bytes` are used. Returns the slots."""
        gone: list[int] = []
        with self._changing() as columns:
            while columns.header[layout.H_USED_BYTES] > used_bytes:
                ready = np.flatnonzero(columns.state == READY)
                if not len(ready):
                    break
                victims = first_to_go(columns, ready, max(1, len(ready) // 64), self._now())
                for slot in victims:
                    self._remove(int(slot))
                columns.header[layout.H_EVICTED] += len(victims)
                gone.extend(int(slot) for slot in victims)
        return gone

    def adopt(self, records: Iterable[tuple[int, BlockHash, int, int, float, int]]) -> int:
        """Takes in what is known to lie in slots: (slot, digest, length, checksum, last used, depth). Slots that are not free
        and digests that are known are skipped. Returns how many were taken."""
        taken = 0
        with self._changing() as columns:
            header = columns.header
            for slot, digest, length, checksum, last_used, depth in records:
                if not 0 <= slot < self.slots or length > self.slot_bytes or columns.at_state[slot] != FREE:
                    continue
                if self.find(digest) is not None:
                    continue
                columns.at_low[slot], columns.at_high[slot] = HALVES.unpack(digest)
                columns.at_length[slot], columns.at_checksum[slot] = length, checksum
                columns.at_last_used[slot], columns.at_depth[slot] = last_used, depth
                columns.at_expected[slot], columns.at_session[slot], columns.at_standing[slot] = 0.0, 0, IDLE
                header[layout.H_CHANGES] += 1
                columns.at_stamp[slot] = header[layout.H_CHANGES]
                columns.at_state[slot] = READY
                self._link(slot)
                header[layout.H_USED_BYTES] += length
                taken += 1
        return taken

    def reclaim(self) -> int:
        """Frees what dead members had begun to write. Returns how many slots that were."""
        with self._changing() as columns:
            return self._reclaim(columns)

    def rebuild(self) -> None:
        """Makes all that follows from the slots anew: something in the books was found to be damaged."""
        with self._changing():
            self._rebuild()

    def places(self) -> list[Place]:
        """Every block that can be found now."""
        columns = self.columns
        found = []
        for slot in np.flatnonzero(columns.state == READY):
            at = int(slot)
            digest = HALVES.pack(columns.at_low[at], columns.at_high[at])
            place = self.find(digest)
            if place is not None:
                found.append(place)
        return found

    def check_integrity(self) -> None:
        """Raises TierCorrupt unless every block can be found exactly once, used bytes add up. What dead members hold is freed
        first."""
        with self._changing() as columns:
            self._reclaim(columns)
            seen: set[int] = set()
            for bucket in range(columns.buckets):
                number = columns.at_heads[bucket]
                steps = 0
                while number:
                    slot = number - 1
                    if not 0 <= slot < self.slots or slot in seen or steps > self.slots:
                        raise TierCorrupt(f"slot {slot} is in the chains twice or does not exist")
                    seen.add(slot)
                    steps += 1
                    if columns.at_state[slot] != READY:
                        raise TierCorrupt(f"slot {slot} can be found but holds no block")
                    if columns.at_low[slot] & (columns.buckets - 1) != bucket:
                        raise TierCorrupt(f"slot {slot} is in the wrong chain")
                    number = columns.at_next[slot]
            ready = {int(slot) for slot in np.flatnonzero(columns.state == READY)}
            if ready != seen:
                raise TierCorrupt(f"{len(ready ^ seen)} slots hold a block that cannot be found")
            used = int(columns.length[columns.state == READY].sum(dtype=np.uint64))
            if used != columns.header[layout.H_USED_BYTES]:
                raise TierCorrupt(f"{used} bytes are used, the table says {columns.header[layout.H_USED_BYTES]}")
            digests = {(columns.at_low[slot], columns.at_high[slot]) for slot in ready}
            if len(digests) != len(ready):
                raise TierCorrupt("a block lies in two slots")

    # Inside the lock.

    def _make_room(self, count: int, now: float, grow: Callable[[int], int] | None, quota: int | None) -> list[int]:
        columns, header = self.columns, self.columns.header
        while quota is not None:
            excess = int(header[layout.H_USED_BYTES]) + count * self.slot_bytes - quota
            ready = np.flatnonzero(columns.state == READY)
            if excess <= 0 or not len(ready):
                break
            self._evict(ready, max(1, excess // self.slot_bytes, len(ready) // 64), now)
        while True:
            usable = min(header[layout.H_USABLE] if grow is not None else self.slots, self.slots)
            free = np.flatnonzero(columns.state[:usable] == FREE)[:count]
            if len(free) >= count:
                break
            if grow is not None and usable < self.slots:
                more = grow(usable)
                if more > usable:
                    header[layout.H_USABLE] = min(more, self.slots)
                    continue
            if self._reclaim(columns):
                continue
            ready = np.flatnonzero(columns.state[:usable] == READY)
            if len(ready):
                # More than is missing, so that not every block that comes looks at all of them.
                self._evict(ready, max(count - len(free), len(ready) // 64), now)
                free = np.flatnonzero(columns.state[:usable] == FREE)[:count]
            break
        return [int(slot) for slot in free]

    def _evict(self, ready: np.ndarray[tuple[int], np.dtype[np.intp]], count: int, now: float) -> None:
        victims = first_to_go(self.columns, ready, count, now)
        for slot in victims:
            self._remove(int(slot))
        self.columns.header[layout.H_EVICTED] += len(victims)

    def _is_mine(self, place: Place) -> bool:
        columns, slot = self.columns, place.slot
        mine = columns.at_owner[slot] == self.member and columns.at_generation[slot] == place.generation
        return bool(mine and columns.at_state[slot] == WRITING)

    def _link(self, slot: int) -> None:
        columns = self.columns
        bucket = columns.at_low[slot] & (columns.buckets - 1)
        columns.at_next[slot] = columns.at_heads[bucket]
        columns.at_heads[bucket] = slot + 1

    def _remove(self, slot: int) -> None:
        columns, header = self.columns, self.columns.header
        bucket = columns.at_low[slot] & (columns.buckets - 1)
        number = columns.at_heads[bucket]
        before = -1
        while number and number - 1 != slot:
            before = number - 1
            number = columns.at_next[before]
        if number:
            if before < 0:
                columns.at_heads[bucket] = columns.at_next[slot]
            else:
                columns.at_next[before] = columns.at_next[slot]
        columns.at_state[slot] = FREE
        header[layout.H_CHANGES] += 1
        columns.at_stamp[slot] = header[layout.H_CHANGES]
        header[layout.H_USED_BYTES] -= columns.at_length[slot]

    def _reclaim(self, columns: SlotColumns) -> int:
        count = 0
        for slot in np.flatnonzero(columns.state == WRITING):
            if not self._file.is_alive(columns.at_owner[int(slot)]):
                columns.at_state[int(slot)] = FREE
                count += 1
        columns.header[layout.H_RECLAIMED] += count
        return count

    def _rebuild(self) -> None:
        """Somebody died while changing the table: what hangs together is made anew from the slots."""
        columns, header = self.columns, self.columns.header
        header[layout.H_DIRTY] = self.member + 1
        columns.heads[:] = 0
        columns.next[:] = 0
        columns.state[columns.state > READY] = FREE
        used = 0
        seen: set[tuple[int, int]] = set()
        for slot in np.flatnonzero(columns.state == READY).tolist():
            digest = (columns.at_low[slot], columns.at_high[slot])
            if digest in seen or columns.at_length[slot] > self.slot_bytes:
                columns.at_state[slot] = FREE
                continue
            seen.add(digest)
            self._link(slot)
            used += columns.at_length[slot]
        header[layout.H_USED_BYTES] = used
        self._reclaim(columns)
        # Whoever mirrors the table looks at all of it again.
        header[layout.H_CHANGES] += 1
        columns.stamp[:] = header[layout.H_CHANGES]
        header[layout.H_REBUILT] += 1
        header[layout.H_DIRTY] = 0
