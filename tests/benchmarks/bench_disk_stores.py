"""Our slots in one file against LMDB, as the disk tier would use either: blocks of one size, a bound, several processes.

    python -m tests.benchmarks.bench_disk_stores --directory /var/tmp --blocks 1500

Both keep the same checksum and verify it. LMDB runs in both of its ways: with a sync at each commit, which it needs to survive
a loss of power, and without. Cold means that the file is not in the page cache (it is dropped with posix_fadvise).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from offload.checksum import Bytes, payload_checksum
from offload.disk_store import DiskStore
from offload.tier import Outgoing
from tests.offload.blocks import digest_of

BATCH = 16


class Slots:
    """The disk tier."""

    def __init__(self, directory: Path, block: int, blocks: int) -> None:
        self._make = lambda: DiskStore(
            directory, digest_of(10**9), block, blocks * (block + 4096), min_free=0, tables=directory
        )
        self._store = self._make()

    def put(self, batch: list[Outgoing], evict: list[bytes]) -> None:
        self._store.store(batch)  # it makes room by itself

    def get(self, digests: list[bytes], into: Bytes) -> int:
        self._store.ahead(digests)
        return sum(self._store.load(digest, into) for digest in digests)

    def flush(self) -> None:
        self._store.flush()

    def reopen(self) -> None:
        self._store.close()
        _drop(self._store.place)
        self._store = self._make()

    def close(self) -> None:
        self._store.close()


class Lmdb:
    """LMDB as its documentation recommends for large values: many to a transaction, no read-ahead switched off."""

    def __init__(self, directory: Path, block: int, blocks: int, sync: bool) -> None:
        import lmdb

        # Room for the free list's holes: with less it says MDB_MAP_FULL while half of it is free but scattered.
        size = (blocks + 4 * BATCH) * (block + 8192) * 2
        self._directory = directory
        self._make: Callable[[], Any] = lambda: lmdb.open(
            str(directory), map_size=size, sync=sync, metasync=sync, writemap=False, max_readers=64
        )
        self._environment = self._make()

    def put(self, batch: list[Outgoing], evict: list[bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            for digest in evict:
                transaction.delete(digest)
            for block in batch:
                checksum = payload_checksum(block.payload, block.digest, 0)
                transaction.put(block.digest, checksum.to_bytes(8, "little") + block.payload.tobytes())

    def get(self, digests: list[bytes], into: Bytes) -> int:
        found = 0
        with self._environment.begin(buffers=True) as transaction:
            for digest in digests:
                value = transaction.get(digest)
                if value is None:
                    continue
                np.copyto(into, np.frombuffer(value, dtype=np.uint8)[8:])
                found += payload_checksum(into, digest, 0) == int.from_bytes(value[:8], "little")
        return found

    def flush(self) -> None:
        self._environment.sync(True)

    def reopen(self) -> None:
        self._environment.close()
        _drop(self._directory)
        self._environment = self._make()

    def close(self) -> None:
        self._environment.close()


def _drop(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sequential_rate(path: Path, size: int) -> float:
    """GB/s of a plain sequential read from a cold cache, 1 MiB at a time, as dd does."""
    buffer = np.zeros(1 << 20, dtype=np.uint8)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(buffer.data)
    _drop(path.parent)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer.data):
            pass
    rate = size / (time.perf_counter() - began) / 1e9
    path.unlink()
    return rate


def measure(store: Slots | Lmdb, block: int, blocks: int) -> dict[str, float]:
    """GB/s of each kind of work; seconds to open again."""
    payload = np.random.default_rng(0).integers(0, 256, block, dtype=np.uint8)
    into = np.empty(block, dtype=np.uint8)
    gigabytes = block / 1e9
    figures: dict[str, float] = {}

    def fill(first: int, count: int, evict: bool) -> float:
        began = time.perf_counter()
        for start in range(first, first + count, BATCH):
            numbers = range(start, min(start + BATCH, first + count))
            for number in numbers:
                payload[:8] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
            batch = [Outgoing(digest_of(number), payload.copy()) for number in numbers]
            store.put(batch, [digest_of(number - blocks) for number in numbers] if evict else [])
        store.flush()
        return count * gigabytes / (time.perf_counter() - began)

    figures["store"] = fill(0, blocks, evict=False)
    figures["store when full"] = fill(blocks, blocks, evict=True)
    began = time.perf_counter()
    store.reopen()
    figures["seconds to open"] = time.perf_counter() - began
    chains = [[digest_of(number) for number in range(start, start + 50)] for start in range(blocks, 2 * blocks - 50, 50)]
    random.Random(1).shuffle(chains)
    for name in ("load cold", "load warm"):
        began = time.perf_counter()
        found = sum(store.get(chain, into) for chain in chains)
        figures[name] = found * gigabytes / (time.perf_counter() - began)
        figures[f"{name}, found"] = found / sum(map(len, chains))
    store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=1500)
    parser.add_argument("--block-bytes", type=int, default=368_640, help="SmolLM2-135M in bfloat16, 16 tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    makers: dict[str, Callable[[Path], Slots | Lmdb]] = {
        "slots": lambda path: Slots(path, options.block_bytes, options.blocks),
        "lmdb": lambda path: Lmdb(path, options.block_bytes, options.blocks, sync=True),
        "lmdb, no sync": lambda path: Lmdb(path, options.block_bytes, options.blocks, sync=False),
    }
    for name, make in makers.items():
        path = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            results[name] = measure(make(path), options.block_bytes, options.blocks)
        except ImportError:
            print("lmdb is not installed (pip install lmdb), so only our own store was measured")
        finally:
            shutil.rmtree(path)
    path = Path(tempfile.mkdtemp(dir=options.directory))
    results["sequential read"] = {"load cold": sequential_rate(path / "f", options.block_bytes * options.blocks)}
    shutil.rmtree(path)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    names = list(next(iter(results.values())))
    print(f"{'GB/s':18}" + "".join(f"{name:>20}" for name in names))
    for store, figures in results.items():
        print(f"{store:18}" + "".join(f"{figures[name]:20.3f}" if name in figures else " " * 20 for name in names))


if __name__ == "__main__":
    main()
