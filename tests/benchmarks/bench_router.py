"""Microseconds of a routing decision, by blocks of the prompt and workers, and what it is made of.

    python tests/benchmarks/bench_router.py [--json]

Every worker holds a share of the prompt's beginning, one of them all of it, beside blocks of other sessions; the prompt's
digests are fresh objects each time, as they are when a request has just been hashed. Prints medians and 99th percentiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import Snapshot
from prefix_cache.hashing import join_digests
from prefix_cache.index import ResidencyIndex

BLOCK_SIZE = 16
OTHER_BLOCKS = 5000
ROUNDS = 200


def measure(blocks: int, workers: int) -> dict[str, float]:
    index = ResidencyIndex()
    prompt = [os.urandom(16) for _ in range(blocks)]
    names = [f"worker-{number}" for number in range(workers)]
    for number, name in enumerate(names):
        held = prompt[: blocks * (workers - number) // workers] + [os.urandom(16) for _ in range(OTHER_BLOCKS)]
        index.apply(name, Snapshot("i", 0, {"device": join_digests(held)}))
    router = Router(RouterConfig(), index)
    loads = [WorkerLoad(name, queued_tokens=100, requests=4, max_concurrency=64) for name in names]
    session = SessionRef("tenant", "session")
    lookups, routes = [], []
    for _ in range(ROUNDS):
        digests = tuple(bytes(bytearray(digest)) for digest in prompt)
        began = time.perf_counter()
        index.lookup(digests)
        lookups.append(time.perf_counter() - began)
        digests = tuple(bytes(bytearray(digest)) for digest in prompt)
        began = time.perf_counter()
        route = router.route(
            digests=digests, prompt_tokens=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE, session=session, loads=loads
        )
        routes.append(time.perf_counter() - began)
        route.computed(0)
    return {
        "blocks": blocks,
        "workers": workers,
        "lookup_p50_us": round(statistics.median(lookups) * 1e6, 1),
        "lookup_p99_us": round(sorted(lookups)[int(ROUNDS * 0.99)] * 1e6, 1),
        "route_p50_us": round(statistics.median(routes) * 1e6, 1),
        "route_p99_us": round(sorted(routes)[int(ROUNDS * 0.99)] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    rows = [measure(blocks, workers) for blocks in (10, 100, 1000, 6000) for workers in (2, 8, 64)]
    if arguments.json:
        print(json.dumps(rows))
        return
    print("  ".join(f"{name:>13}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>13}" for value in row.values()))


if __name__ == "__main__":
    main()
