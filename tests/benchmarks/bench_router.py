"""Microseconds of a routing decision, by blocks of the prompt and workers, and what it is made of.

    python tests/benchmarks/bench_router.py [--json]

Every prompt is new to the index's eyes: its digests are fresh objects, as they are when a request has just been hashed, and
between decisions workers store and give up blocks, as they do when their caches are full. `few`: two workers hold nearly all
of the prompt and the others the system prompt that all sessions share. `many`: each worker holds another share of it, which
no lookup likes.
`new`: nobody holds more than the system prompt. Prints medians and 99th percentiles, of the wall clock and of the processor
time: the former counts what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import BlocksRemoved, BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import JoinedDigests
from prefix_cache.index import ResidencyIndex

BLOCK_SIZE = 16
OTHER_BLOCKS = 5000
ROUNDS = 500


def held(case: str, blocks: int, number: int, workers: int) -> int:
    """How many blocks of the prompt a worker holds."""
    system = min(blocks // 4, 250)
    if case == "many":
        return blocks * (workers - number) // workers
    return blocks - 20 * number if case == "few" and number < 2 and blocks > 40 else system


def measure(case: str, blocks: int, workers: int) -> dict[str, float | str]:
    index = ResidencyIndex()
    prompt = os.urandom(16 * blocks)
    names = [f"worker-{number}" for number in range(workers)]
    for number, name in enumerate(names):
        joined = prompt[: 16 * held(case, blocks, number, workers)] + os.urandom(16 * OTHER_BLOCKS)
        index.apply(name, Snapshot("i", 0, {"device": joined}))
    router = Router(RouterConfig(), index)
    loads = [WorkerLoad(name, queued_tokens=100, requests=4, max_concurrency=64, kv_tokens=1_000_000) for name in names]
    lookups, routes, routes_cpu = [], [], []
    gc.collect()
    gc.freeze()  # A server that has loaded its tokenizers does the same.
    for round_number in range(ROUNDS):
        worker = names[round_number % workers]
        fresh = os.urandom(16 * 8)
        events = (BlocksStored(fresh, prompt[:16]), BlocksRemoved(fresh[: 16 * 4]))
        index.apply(worker, EventBatch("i", 1 + round_number // workers, events))
        digests = JoinedDigests(bytes(bytearray(prompt)))
        began = time.perf_counter()
        index.lookup(digests)
        lookups.append(time.perf_counter() - began)
        digests = JoinedDigests(bytes(bytearray(prompt)))
        loads_now = [WorkerLoad(load.name, 100, 4, 64, "", 1_000_000) for load in loads]
        began, began_cpu = time.perf_counter(), time.thread_time()
        route = router.route(
            digests=digests,
            prompt_tokens=blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            session=SessionRef("tenant", f"session-{round_number % 7}"),
            loads=loads_now,
        )
        routes_cpu.append(time.thread_time() - began_cpu)
        routes.append(time.perf_counter() - began)
        route.failed()
    return {
        "case": case,
        "blocks": blocks,
        "workers": workers,
        **percentiles("lookup", lookups),
        **percentiles("route", routes),
        **percentiles("route_cpu", routes_cpu),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    return {
        f"{name}_p50": round(statistics.median(seconds) * 1e6, 1),
        f"{name}_p99": round(sorted(seconds)[int(len(seconds) * 0.99)] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    rows = [
        measure(case, blocks, workers) for case in ("few", "many", "new") for blocks in (100, 1000, 6250) for workers in (8, 64)
    ]
    if arguments.json:
        print(json.dumps(rows))
        return
    print("  ".join(f"{name:>13}" for name in rows[0]), "  (microseconds)")
    for row in rows:
        print("  ".join(f"{value:>13}" for value in row.values()))


if __name__ == "__main__":
    main()
