"""A table in a file of shared memory: attaching to it, making it, leaving it, and knowing who is alive.

Members hold a lock of their own for as long as they live, so what a dead one had begun can be told from what a living one does.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import time
from pathlib import Path

from offload import slot_layout as layout
from offload.errors import TierUnavailable
from offload.shared_locks import ByteLocks, SharedMutex
from offload.slot_layout import SlotColumns
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

MAX_MEMBERS = 1024
FIRST_MEMBER = 16
"""The lock of member 0 (offload.shared_locks)."""

_MUTEX, _OPENING = 0, 1
HALVES = struct.Struct("<QQ")
"""A digest as two words."""
_OPEN_BUDGET = 30.0


class TableFile:
    """One process' hold of a table.

    is_fresh: it was made just now. is_alone: nobody else uses it, so what was begun in it will not be finished.
    payload_offset: where the slots' bytes begin, if they are in the file.
    """

    def __init__(self, path: Path, key: BlockHash, slots: int, slot_bytes: int, payload: bool) -> None:
        """As `SlotTable`. Raises TierUnavailable and OSError."""
        self.path = path
        self._key = key
        self._slot_bytes = slot_bytes
        self._payload = payload
        self.descriptor = -1
        self._open(slots)

    def _open(self, slots: int) -> None:
        deadline = time.monotonic() + _OPEN_BUDGET
        while True:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._locks = ByteLocks(self.descriptor)
            self.mutex = SharedMutex(self._locks, _MUTEX)
            opening = SharedMutex(self._locks, _OPENING, budget=max(0.0, deadline - time.monotonic()))
            try:
                with opening.held():
                    if not self._is_current():  # the last member unlinked it while we waited
                        continue
                    if os.fstat(self.descriptor).st_uid != os.getuid():
                        raise TierUnavailable(f"{self.path} belongs to somebody else; remove it or run as its owner.")
                    self._attach(slots)
                    return
            except BaseException:
                os.close(self.descriptor)
                self.descriptor = -1
                raise
            finally:
                if self.descriptor >= 0 and not self._is_current():
                    os.close(self.descriptor)
                    self.descriptor = -1

    def _is_current(self) -> bool:
        try:
            there, ours = os.stat(self.path), os.fstat(self.descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _attach(self, slots: int) -> None:
        alone = self._locks.is_range_free(FIRST_MEMBER, MAX_MEMBERS)
        known = self._known_geometry()
        self.is_alone = alone
        if known is None and not alone:
            raise TierUnavailable(f"{self.path} is used by processes of another version or model; give them another directory.")
        fresh = known is None or (alone and known != slots)
        self.is_fresh = fresh
        slots = slots if known is None or alone else known
        table = layout.table_bytes(slots)
        self.payload_offset = table
        size = table + (slots * self._slot_bytes if self._payload else 0)
        if fresh:
            if known is None and os.fstat(self.descriptor).st_size:
                logger.warning("%s was written by another version or is damaged, and is not read; it begins anew.", self.path)
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, size)
            try:
                # A page that cannot be had kills the process that touches it, so the memory is asked for first.
                os.posix_fallocate(self.descriptor, 0, table)
            except OSError:
                os.unlink(self.path)
                raise
        self.slots = slots
        self.member = self._join()
        os.utime(self.descriptor)
        self.memory = mmap.mmap(self.descriptor, size)
        self.columns = SlotColumns(self.memory, slots)
        if fresh:
            low, high = HALVES.unpack(self._key)
            self.columns.clear((low, high), self._slot_bytes)

    def _known_geometry(self) -> int | None:
        """The slots of a usable table in the file, None where there is none."""
        head = os.pread(self.descriptor, 64, 0)
        if len(head) < 64:
            return None
        words = struct.unpack("<8Q", head)
        slots = words[layout.H_SLOTS]
        if words[layout.H_MAGIC] != layout.MAGIC or words[layout.H_SLOT_BYTES] != self._slot_bytes:
            return None
        if (words[layout.H_KEY_LOW], words[layout.H_KEY_HIGH]) != HALVES.unpack(self._key) or not 0 < slots < 1 << 31:
            return None
        size = layout.table_bytes(slots) + (slots * self._slot_bytes if self._payload else 0)
        return slots if os.fstat(self.descriptor).st_size == size else None

    def _join(self) -> int:
        for member in range(MAX_MEMBERS):
            if self._locks.try_lock(FIRST_MEMBER + member):
                return member
        raise TierUnavailable(f"{MAX_MEMBERS} processes use {self.path} already.")

    def close(self, *, keep: bool = False) -> None:
        """Leaves. The last one takes the table along, unless `keep`. Idempotent."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(TierUnavailable, OSError), SharedMutex(self._locks, _OPENING).held():
            if not keep and self._locks.is_range_free(FIRST_MEMBER, MAX_MEMBERS) and self._is_current():
                os.unlink(self.path)
        # The mapping keeps the file open, and with it the locks.
        self._locks.unlock(FIRST_MEMBER + self.member)
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)

    @property
    def members(self) -> int:
        """Processes that use it now, this one among them."""
        return 1 + self._locks.count_held_elsewhere(FIRST_MEMBER, MAX_MEMBERS)

    def is_alive(self, member: int) -> bool:
        """True while the process that is this member lives."""
        return member == self.member or self._locks.is_held_elsewhere(FIRST_MEMBER + member)


def remove_abandoned(directory: Path, prefix: str, older_than: float) -> list[Path]:
    """Removes tables in `directory`, whose names begin with `prefix`, that nobody uses and nobody has attached to for
    `older_than` seconds: what replicas left that were killed and whose model was not served since. Returns them."""
    removed = []
    limit = time.time() - older_than
    for path in sorted(directory.glob(prefix + "*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status, locks = os.fstat(descriptor), ByteLocks(descriptor)
                if status.st_uid != os.getuid() or status.st_mtime > limit or not locks.try_lock(_OPENING):
                    continue
                if locks.is_range_free(FIRST_MEMBER, MAX_MEMBERS):
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed
