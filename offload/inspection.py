"""Tiers as those see them who do not serve: what there is, without knowing the models it belongs to."""

from __future__ import annotations

import abc
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from offload import disk_layout
from offload import slot_layout as layout
from offload.arena import SHARED_MEMORY, HostArena
from offload.disk_records import RECORD_BYTES, read_records
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from offload.shared_locks import ByteLocks
from offload.table_file import FIRST_MEMBER, MAX_MEMBERS
from prefix_cache.events import DISK, HOST

_UNREADABLE = "(damaged, or of another version)"


@dataclass(frozen=True, slots=True)
class Inspected:
    """What one tier of one model holds. `last_use`: seconds since 1970, None where nobody knows."""

    tier: str
    key: str
    place: str
    model: str
    codec: str
    blocks: int
    used_bytes: int
    max_bytes: int
    in_use: bool
    last_use: float | None


class HeldTier(abc.ABC):
    """A tier that is there. Whatever changes it joins its users for that long; raises TierUnavailable and OSError."""

    tier: str
    key: str

    @abc.abstractmethod
    def look(self) -> Inspected:
        """Changes nothing. Raises OSError and TierUnavailable."""

    @abc.abstractmethod
    def verify(self) -> tuple[int, int]:
        """Reads every block: how many are sound, and how many were not and are gone."""

    @abc.abstractmethod
    def trim(self, size: int | float) -> tuple[int, int]:
        """Gives up blocks until they take `size` bytes, or that share of what they take. How many went, and bytes left."""

    def clear(self) -> int:
        """Gives up everything; how many blocks that was."""
        return self.trim(0)[0]


class HeldTable(HeldTier):
    """A tier of this machine, which keeps its books in a shared table."""

    @abc.abstractmethod
    def _open(self) -> HostArena | DiskStore:
        """As one of its users."""

    def verify(self) -> tuple[int, int]:
        tier = self._open()
        try:
            return tier.verify()
        finally:
            self._leave(tier)

    def trim(self, size: int | float) -> tuple[int, int]:
        tier = self._open()
        try:
            target = int(size * tier.table.used_bytes) if isinstance(size, float) else size
            gone = tier.trim(target)
            return gone, tier.table.used_bytes
        finally:
            self._leave(tier)

    @staticmethod
    def _leave(tier: HostArena | DiskStore) -> None:
        # An arena that nobody uses was left by replicas that were killed: the next one is to find it, unless it is empty.
        tier.table.close(keep=isinstance(tier, HostArena) and tier.table.count() > 0)
        tier.close()


class HeldArena(HeldTable):
    """An arena in shared memory."""

    tier = HOST

    def __init__(self, path: Path) -> None:
        self._path = path
        self.key = path.name.rpartition("-")[2]

    def look(self) -> Inspected:
        with self._path.open("rb") as file:
            in_use = not ByteLocks(file.fileno()).is_range_free(FIRST_MEMBER, MAX_MEMBERS)
            words = self._header(file)
            if words is None:
                return Inspected(HOST, self.key, str(self._path), _UNREADABLE, "", 0, 0, 0, in_use, None)
            slots = words[layout.H_SLOTS]
            with mmap.mmap(file.fileno(), layout.table_bytes(slots), prot=mmap.PROT_READ) as memory:
                content = bytes(memory)
        columns = layout.SlotColumns(content, slots)
        blocks = int(np.count_nonzero(columns.state == layout.READY))
        used, size = columns.header[layout.H_USED_BYTES], slots * words[layout.H_SLOT_BYTES]
        return Inspected(HOST, self.key, str(self._path), "", "", blocks, used, size, in_use, None)

    def _open(self) -> HostArena:
        with self._path.open("rb") as file:
            words = self._header(file)
        if words is None:
            raise TierUnavailable(f"{self._path} is damaged or of another version; remove it when nothing uses it.")
        slot_bytes = words[layout.H_SLOT_BYTES]
        return HostArena(bytes.fromhex(self.key), slot_bytes, words[layout.H_SLOTS] * slot_bytes, self._path.parent)

    @staticmethod
    def _header(file: BinaryIO) -> tuple[int, ...] | None:
        """The first words of a table, None when it is none that this version understands."""
        head = file.read(64)
        if len(head) < 64:
            return None
        words = struct.unpack("<8Q", head)
        if words[layout.H_MAGIC] != layout.MAGIC or not 0 < words[layout.H_SLOTS] < 1 << 31:
            return None
        return words if os.fstat(file.fileno()).st_size >= layout.table_bytes(words[layout.H_SLOTS]) else None


class HeldDisk(HeldTable):
    """A namespace on disk."""

    tier = DISK

    def __init__(self, directory: Path, place: Path, about: disk_layout.About) -> None:
        self._directory = directory
        self._place = place
        self._about = about
        self.key = place.name

    def look(self) -> Inspected:
        try:
            records = list(read_records((self._place / "records").read_bytes()))
        except FileNotFoundError:
            records = []
        return Inspected(
            DISK,
            self.key,
            str(self._place),
            self._about.model,
            self._about.codec,
            len(records),
            sum(record[3] for record in records),
            self._about.max_bytes,
            disk_layout.is_in_use(self._place),
            disk_layout.last_use(self._place),
        )

    def _open(self) -> DiskStore:
        size = self._about.slot_bytes
        records = self._place / "records"
        slots = max(1, records.stat().st_size // RECORD_BYTES) if records.exists() else 1
        bound = max(self._about.max_bytes, slots * (size + RECORD_BYTES))
        about = self._about
        return DiskStore(
            self._directory, bytes.fromhex(self.key), size, bound, min_free=0, model=about.model, codec=about.codec
        )


def held_tiers(directory: Path | None, shared_memory: Path = SHARED_MEMORY) -> list[HeldTier]:
    """What there is: arenas of this user, and what lies in `directory`."""
    paths = sorted(shared_memory.glob(f"turnkeep-{os.getuid()}-host-*"))
    found: list[HeldTier] = [HeldArena(path) for path in paths]
    if directory is not None:
        for place in disk_layout.namespaces(directory):
            about = disk_layout.read_about(place)
            if about is not None:
                found.append(HeldDisk(directory, place, about))
    return found
