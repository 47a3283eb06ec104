"""A medium that fails, is slow, or loses what was not synced."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

from offload.checksum import Bytes, as_buffer
from offload.files import Files

SECTOR = 512


class FaultyFiles(Files):
    """Gives an error for what is in `failing`, and waits for `let_go` in what is in `hanging`."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.number = errno.EIO
        self.free = 1 << 40

    def _may(self, what: str) -> None:
        if what in self.hanging:
            self.entered.set()
            self.let_go.wait(60)
        if what in self.failing:
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path) -> int:
        self._may("open")
        return super().open(path)

    def read_into(self, descriptor: int, into: Bytes, offset: int) -> int:
        self._may("read")
        return super().read_into(descriptor, into, offset)

    def write(self, descriptor: int, payload: Bytes | bytes, offset: int) -> None:
        self._may("write")
        super().write(descriptor, payload, offset)

    def sync(self, descriptor: int) -> None:
        self._may("sync")
        super().sync(descriptor)

    def free_bytes(self, path: Path) -> int:
        return self.free


class VolatileFiles(Files):
    """Knows which sectors were written since the last sync, and what they held on the medium, so that a loss of power can take
    any of them back."""

    def __init__(self) -> None:
        self._before: dict[int, dict[int, bytes]] = {}
        self._sizes: dict[int, int] = {}
        self.synced = 0

    def write(self, descriptor: int, payload: Bytes | bytes, offset: int) -> None:
        before = self._before.setdefault(descriptor, {})
        self._sizes.setdefault(descriptor, os.fstat(descriptor).st_size)
        end = offset + len(memoryview(as_buffer(payload)))
        for sector in range(offset // SECTOR, -(-end // SECTOR)):
            if sector not in before:
                before[sector] = os.pread(descriptor, SECTOR, sector * SECTOR)
        super().write(descriptor, payload, offset)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._before.pop(descriptor, None)
        self._sizes.pop(descriptor, None)
        self.synced += 1

    def lose_power(self, chance: random.Random, share: float) -> int:
        """What was not synced is on the medium or not, sector by sector. Returns how many are not. The files must be open."""
        lost = 0
        for descriptor, before in self._before.items():
            for sector, content in before.items():
                if chance.random() < share:
                    lost += 1
                    os.pwrite(descriptor, content.ljust(SECTOR, b"\0"), sector * SECTOR)
            if chance.random() < share / 2:
                # The new size was not written either; what lies behind the old one is gone.
                os.ftruncate(descriptor, min(self._sizes[descriptor], os.fstat(descriptor).st_size))
        self._before.clear()
        self._sizes.clear()
        return lost
