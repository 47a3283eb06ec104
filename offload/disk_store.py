"""The disk tier: slots in one file, shared by the replicas of a machine that have interchangeable KV.

The live table is in shared memory (offload.slot_table), like the arena's: a page of a mapped file that a broken medium does not
give kills the process that reads it, so nothing of the disk is mapped. The first replica fills the table from the records on
disk.
Writes are not ordered and not waited for: what a kill or a loss of power leaves behind is either a block whose checksum,
seeded with its name, is right, or no block.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from offload import disk_layout
from offload import slot_layout as layout
from offload.arena import SHARED_MEMORY
from offload.checksum import Bytes, key_salt, payload_checksum
from offload.disk_layout import FORMAT, About, InUse
from offload.disk_records import EMPTY, RECORD_BYTES, pack_record, read_records
from offload.errors import TierGone, TierMisconfigured, TierUnavailable
from offload.files import Files
from offload.seldom import Seldom
from offload.slot_table import Place, SlotTable
from offload.tier import Outgoing, TierFigures
from prefix_cache.events import DISK
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

ABANDONED_AFTER = 14 * 86400.0
"""Seconds after which a namespace that nobody has opened is removed."""

_PAGE = 4096
_GROWTH = 64 << 20
_SYNC_EVERY = 64 << 20
_CHECK_EVERY = 5.0


class DiskStore:
    """A `Tier` in the directory `directory`. Blocks of at most `block_bytes` encoded bytes, `max_bytes` in all."""

    name = DISK

    def __init__(
        self,
        directory: Path,
        key: BlockHash,
        block_bytes: int,
        max_bytes: int,
        *,
        min_free: int = 1 << 30,
        overcommit: int = 1,
        model: str = "",
        codec: str = "",
        files: Files | None = None,
        tables: Path = SHARED_MEMORY,
    ) -> None:
        """key: names what makes blocks interchangeable. min_free: bytes that are left free on the file system. model, codec:
        for those who look. overcommit: slots for each that fits, where blocks are mostly shorter than `block_bytes`; what
        they take together stays bounded. Raises TierUnavailable."""
        self.block_bytes = block_bytes
        self.max_bytes = max_bytes
        self._files = Files() if files is None else files
        self._min_free = min_free
        self._slot_bytes = -(-block_bytes // _PAGE) * _PAGE
        self._salt = key_salt(key)
        self._unsynced = 0
        self._checked = time.monotonic()
        self._errors = 0
        self._damage = Seldom(logger)
        slots = overcommit * max_bytes // (self._slot_bytes + RECORD_BYTES)
        self._quota = max_bytes if overcommit > 1 else None
        if slots < 1:
            raise TierMisconfigured(
                f"The disk tier has {max_bytes} bytes, but one block takes {self._slot_bytes}; give it more."
            )
        self.place = disk_layout.root(directory) / key.hex()
        for name in disk_layout.foreign_formats(directory):
            logger.warning("%s is of another version and is not read; remove it when nothing uses it.", directory / name)
        try:
            self._open(directory, key, slots, About(FORMAT, key.hex(), self._slot_bytes, max_bytes, model, codec), tables)
        except OSError as error:
            raise TierUnavailable(f"{self.place} cannot be used: {error.strerror or error}.") from error

    def _open(self, directory: Path, key: BlockHash, slots: int, about: About, tables: Path) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        disk_layout.remove_abandoned(directory, self.place, ABANDONED_AFTER)
        self._in_use = InUse(self.place)
        known = disk_layout.read_about(self.place)
        fits = known is not None and known.slot_bytes == about.slot_bytes
        self._data = self._files.open(self.place / "data")
        self._records = self._files.open(self.place / "records")
        inode = os.fstat(self._data)
        name = hashlib.blake2b(f"{inode.st_dev}:{inode.st_ino}".encode(), digest_size=12).hexdigest()
        self.table = SlotTable(tables / f"turnkeep-{os.getuid()}-disk-{name}", key, slots, self._slot_bytes)
        if not self.table.is_first:
            return
        if not fits:
            if (self.place / "about").exists():
                logger.warning("%s was written by another version and is not read; it begins anew.", self.place)
            os.ftruncate(self._data, 0)
            os.ftruncate(self._records, 0)
        if known != about:
            disk_layout.write_about(self.place, about)
        self._adopt()

    def _adopt(self) -> None:
        """Fills the table from the records on disk, and gives back what lies beyond the bound."""
        table = self.table
        table.clear()
        size = os.fstat(self._data).st_size
        content = np.zeros(min(os.fstat(self._records).st_size, table.slots * RECORD_BYTES), dtype=np.uint8)
        self._files.read_into(self._records, content, 0)
        now, wall = time.monotonic(), time.time()
        taken = table.adopt(
            (slot, digest, length, checksum, now - max(0.0, wall - used), depth)
            for slot, digest, checksum, length, depth, used in read_records(content.tobytes())
            if slot * self._slot_bytes + length <= size
        )
        limit = table.slots * self._slot_bytes
        if size > limit:
            os.ftruncate(self._data, limit)
            os.ftruncate(self._records, min(table.slots * RECORD_BYTES, os.fstat(self._records).st_size))
        table.columns.header[layout.H_USABLE] = min(table.slots, -(-min(size, limit) // self._slot_bytes))
        if taken:
            logger.info("%s: %d blocks, %.2f GiB, are there from before.", self.place, taken, table.used_bytes / 2**30)

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        return self.table.prefix(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return self.table.lacking(digests)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        length = self.load_any(digest, into)
        return length == len(into)

    def load_any(self, digest: BlockHash, into: Bytes) -> int:
        """Like `load`, of a block that may be shorter than `into`; its length, 0 when it is not to be had."""
        place = self.table.find(digest)
        if place is None:
            return 0
        if not 0 < place.length <= len(into):
            self._heal(place)
            return 0
        target = into[: place.length]
        count = self._files.read_into(self._data, target, place.slot * self._slot_bytes)
        if not self.table.is_still(place):
            return 0
        if count < place.length or payload_checksum(target, digest, self._salt) != place.checksum:
            self._heal(place)
            return 0
        self.table.touch((place,))
        return place.length

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        first = last = -1
        for digest in digests:
            place = self.table.find(digest)
            slot = -1 if place is None else place.slot
            if slot == last + 1 and first >= 0:
                last = slot
                continue
            self._read_ahead(first, last)
            first = last = slot
        self._read_ahead(first, last)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        self._check_directory()
        table = self.table
        places = table.reserve(
            [block.digest for block in blocks],
            depths=[block.depth for block in blocks],
            session=blocks[0].session if blocks else 0,
            grow=self._grow,
            quota=self._quota,
        )
        written: list[tuple[Place, int, int]] = []
        records: list[tuple[int, bytes]] = []
        now = time.time()
        try:
            for block, place in zip(blocks, places, strict=True):
                if place is None:
                    continue
                # First: what the record of this slot has said is not true any more.
                self._files.write(self._records, EMPTY, place.slot * RECORD_BYTES)
                self._files.write(self._data, block.payload, place.slot * self._slot_bytes)
                if self._quota is not None:
                    self._give_back_tail(place.slot, len(block.payload))
                checksum = payload_checksum(block.payload, block.digest, self._salt)
                if block.is_intact is not None and not block.is_intact():
                    continue
                written.append((place, len(block.payload), checksum))
                record = pack_record(place.slot, block.digest, checksum, len(block.payload), block.depth, now)
                records.append((place.slot, record))
                self._unsynced += len(block.payload)
        except OSError:
            self._errors += 1
            raise
        finally:
            done = {place.slot for place, _, _ in written}
            spoilt = [place for place in places if place is not None and place.slot not in done]
            if spoilt:
                table.cancel(spoilt)
            stored = {place.slot for place in table.commit(written)}
        for slot, record in records:
            if slot in stored:
                self._files.write(self._records, record, slot * RECORD_BYTES)
        if self._unsynced > _SYNC_EVERY:
            # Bounds what a loss of power takes, and what the system has to write when somebody else asks it to.
            self._unsynced = 0
            self._files.sync(self._data)
            self._files.sync(self._records)
        return [block.digest for block in blocks if table.find(block.digest) is not None]

    def evict(self, digests: Iterable[BlockHash]) -> int:
        found = (self.table.find(digest) for digest in digests)
        gone = self.table.drop([place for place in found if place is not None])
        self._forget(place.slot for place in gone)
        return len(gone)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self.table.mark(digests, standing, expected=expected, session=session)

    def trim(self, used_bytes: int) -> int:
        """Gives up blocks until `used_bytes` are used, and their space back to the file system. Returns how many went."""
        slots = self.table.shrink(used_bytes)
        self._forget(slots)
        for slot in slots:
            self._files.punch(self._data, slot * self._slot_bytes, self._slot_bytes)
        return len(slots)

    def flush(self) -> None:
        """Returns once everything is on the medium."""
        self._files.sync(self._data)
        self._files.sync(self._records)

    def figures(self) -> TierFigures:
        table = self.table
        return TierFigures(
            blocks=table.count(),
            used_bytes=table.used_bytes,
            max_bytes=self.max_bytes if self._quota is not None else table.slots * self._slot_bytes,
            stored=table.counter(layout.H_STORED),
            evicted=table.counter(layout.H_EVICTED),
            healed=table.counter(layout.H_HEALED),
            reclaimed=table.counter(layout.H_RECLAIMED),
            errors=self._errors,
            users=table.members,
        )

    def verify(self) -> tuple[int, int]:
        """Reads every block; returns how many are sound and how many were not and are gone now."""
        sound = damaged = 0
        buffer = np.empty(self._slot_bytes, dtype=np.uint8)
        for place in sorted(self.table.places(), key=lambda place: place.slot):
            target = buffer[: place.length]
            count = self._files.read_into(self._data, target, place.slot * self._slot_bytes)
            if not self.table.is_still(place):
                continue
            if count == place.length and payload_checksum(target, place.digest, self._salt) == place.checksum:
                sound += 1
            else:
                damaged += 1
                self._heal(place)
        return sound, damaged

    def check_integrity(self) -> None:
        self.table.check_integrity()

    def close(self) -> None:
        if self._data < 0:
            return
        # The records have the rest: the table of the last one to leave is not needed any more.
        self.table.close()
        self._in_use.close()
        self._files.close(self._data)
        self._files.close(self._records)
        self._data = self._records = -1

    def _heal(self, place: Place) -> None:
        self._damage.say("%s: the block in slot %d was damaged and is gone.", self.place, place.slot)
        if self.table.drop((place,), damaged=True):
            self._forget((place.slot,))

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._files.write(self._records, EMPTY, slot * RECORD_BYTES)

    def _give_back_tail(self, slot: int, length: int) -> None:
        pages = -(-length // _PAGE) * _PAGE
        if pages < self._slot_bytes:
            self._files.punch(self._data, slot * self._slot_bytes + pages, self._slot_bytes - pages)

    def _read_ahead(self, first: int, last: int) -> None:
        if first >= 0:
            self._files.will_need(self._data, first * self._slot_bytes, (last + 1 - first) * self._slot_bytes)

    def _grow(self, usable: int) -> int:
        room = (self._files.free_bytes(self.place) - self._min_free) // (self._slot_bytes + RECORD_BYTES)
        return usable + max(0, min(max(1, _GROWTH // self._slot_bytes), self.table.slots - usable, room))

    def _check_directory(self) -> None:
        """Whoever removes the directory means it: what is written to a file without a name is lost and takes space."""
        now = time.monotonic()
        if now - self._checked < _CHECK_EVERY:
            return
        self._checked = now
        try:
            there, ours = os.stat(self.place / "data"), os.fstat(self._data)
        except FileNotFoundError:
            raise TierGone(f"{self.place} was removed; what lay there is lost, and it begins anew.") from None
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise TierGone(f"{self.place} was replaced; it is opened anew.")
