"""How fast the tiers give blocks back, beside what memory and disk do by themselves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from offload.arena import SHARED_MEMORY, HostArena
from offload.disk_store import DiskStore
from offload.tier import Outgoing

_RUNS = 3
_KEY = b"\x07" * 16


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s. `memcpy`: one block after the other from memory that is not cached. `sequential_read`: 1 MiB at a time from a file
    that is not in the page cache, as dd does."""

    memcpy: float
    host_load: float
    host_store: float
    sequential_read: float
    disk_load: float
    disk_store: float


def measure_rates(block_bytes: int, blocks: int, directory: Path) -> Rates:
    """The best of three runs of each, over `blocks` blocks. Leaves nothing behind."""
    source = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    names = [xxhash.xxh3_128_digest(b"%d" % number) for number in range(blocks)]
    size = blocks * block_bytes
    with tempfile.TemporaryDirectory(dir=directory) as below, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        arena = HostArena(_KEY, block_bytes, (blocks + 1) * (block_bytes + 4096), Path(shared))
        disk = DiskStore(Path(below), _KEY, block_bytes, (blocks + 1) * (block_bytes + 8192), min_free=0, tables=Path(shared))
        batches = [
            [Outgoing(names[at], source[at]) for at in range(first, min(first + 16, blocks))] for first in range(0, blocks, 16)
        ]

        def copy() -> None:
            for number in range(blocks):
                np.copyto(target[number], source[number])

        def store(tier: HostArena | DiskStore) -> None:
            tier.evict(names)
            for batch in batches:
                tier.store(batch)

        def load(tier: HostArena | DiskStore) -> None:
            for first in range(0, blocks, 64):
                tier.ahead(names[first : first + 64])
                for number in range(first, min(first + 64, blocks)):
                    if not tier.load(names[number], target[number]):
                        raise RuntimeError("a block that was just stored is not there")

        data = disk.place / "data"

        def read() -> None:
            buffer = bytearray(1 << 20)
            with data.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        try:
            memcpy = _best(copy, size)
            host_store = _best(lambda: store(arena), size)
            host_load = _best(lambda: load(arena), size)
            disk_store = _best(lambda: store(disk), size)
            disk.flush()
            disk_load = _best(lambda: load(disk), size, lambda: _drop(data))
            sequential = _best(read, size, lambda: _drop(data))
        finally:
            arena.close()
            disk.close()
    return Rates(memcpy, host_load, host_store, sequential, disk_load, disk_store)


def _best(work: Callable[[], None], size: int, before: Callable[[], None] | None = None) -> float:
    seconds = []
    for _ in range(_RUNS):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds) / 1e9


def _drop(path: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
