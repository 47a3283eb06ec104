"""What the residency index takes: memory for ten million blocks, growth under churn, microseconds of a lookup, time of a
snapshot.

    python tests/benchmarks/bench_index.py [--blocks 10000000] [--json]

Memory is the resident set of this process beyond what it had before, digests included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time

import psutil

from prefix_cache.events import BlocksRemoved, BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import JoinedDigests
from prefix_cache.index import ResidencyIndex

ROOT = bytes(16)
WORKERS = 16
CHUNK = 4096
CHURN = 1_000_000


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def megabytes(size: float) -> float:
    return round(size / 1e6, 1)


def memory(blocks: int) -> dict[str, float]:
    """Distinct blocks of sixteen workers, then as many again: the least recently used go."""
    before = resident()
    index = ResidencyIndex(max_blocks=blocks)
    sequence = [0] * WORKERS

    def fill(count: int) -> float:
        slowest = 0.0
        for number in range(count // CHUNK):
            worker = number % WORKERS
            sequence[worker] += 1
            batch = EventBatch("i", sequence[worker], (BlocksStored(os.urandom(16 * CHUNK), ROOT),))
            began = time.perf_counter()
            index.apply(f"worker-{worker}", batch)
            slowest = max(slowest, time.perf_counter() - began)
        return slowest

    fill(blocks)
    full = resident() - before
    slowest = fill(CHURN)
    after = resident() - before
    return {
        "blocks": len(index),
        "megabytes": megabytes(full),
        "bytes_per_block": round(full / len(index), 1),
        "megabytes_after_a_million_more": megabytes(after),
        "evicted": index.evicted,
        "slowest_batch_of_4096_ms": round(slowest * 1e3, 1),
    }


def churn() -> dict[str, float]:
    """A million random blocks stored and removed again by one worker, a hundred thousand at a time."""
    index = ResidencyIndex(max_blocks=CHURN)
    sizes, seconds, sequence = [], 0.0, 0
    for _ in range(10):
        joined = os.urandom(16 * CHURN // 10)
        began = time.perf_counter()
        for event in (BlocksStored(joined, ROOT), BlocksRemoved(joined)):
            sequence += 1
            index.apply("w", EventBatch("i", sequence, (event,)))
        seconds += time.perf_counter() - began
        sizes.append(resident())
    return {
        "left": len(index),
        "microseconds_per_block": round(seconds / CHURN * 1e6, 2),
        "megabytes_after_the_first": megabytes(sizes[0]),
        "megabytes_at_the_end": megabytes(sizes[-1]),
    }


def lookups() -> dict[str, float]:
    """A thousand blocks that one worker of sixteen holds, among a million others."""
    index = ResidencyIndex()
    for worker in range(WORKERS):
        index.apply(f"worker-{worker}", Snapshot("i", 0, {"device": os.urandom(16 * 62_500)}))
    prompts = [os.urandom(16 * 1000) for _ in range(200)]
    for number, prompt in enumerate(prompts):
        index.apply("worker-3", EventBatch("i", number + 1, (BlocksStored(prompt, ROOT),)))
    times = []
    for prompt in prompts * 5:
        digests = JoinedDigests(prompt)
        began = time.perf_counter()
        found = index.lookup(digests)
        times.append(time.perf_counter() - began)
        if found != {"worker-3": 1000}:
            raise AssertionError(found)
    times.sort()
    return {
        "lookup_of_1000_blocks_p50_us": round(times[len(times) // 2] * 1e6, 1),
        "lookup_of_1000_blocks_p99_us": round(times[int(len(times) * 0.99)] * 1e6, 1),
    }


def snapshot() -> dict[str, float]:
    """A worker's 100,000 blocks, as after a restart of the gateway."""
    index = ResidencyIndex()
    message = Snapshot("i", 0, {"device": os.urandom(16 * 100_000)})
    began = time.perf_counter()
    index.apply("w", message)
    return {"snapshot_of_100000_blocks_ms": round((time.perf_counter() - began) * 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="how many the index may hold")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    results = {
        "lookup": lookups(),
        "snapshot": snapshot(),
        "churn": churn(),
        "memory": memory(arguments.blocks),
    }
    if arguments.json:
        print(json.dumps(results))
        return
    for part, values in results.items():
        for name, value in values.items():
            print(f"{part:>10}  {name:<34} {value:>14,}")


if __name__ == "__main__":
    main()
