"""Recorded traffic over eight simulated replicas: what routing finds in their caches, and how long first tokens take.

    python tests/benchmarks/bench_routing_traces.py --kv-cache-tester FOLDER --mooncake FILE [--policy NAME]... [--json]

The gateway's own router and index place every request; replicas are the engine's block pool and batching on a virtual clock
(traces/fleet). Two sizes of cache: `fleet`, where all replicas together hold a quarter of the trace's distinct blocks, and
`each`, where each of them does. `of bound`: blocks found, as a share of what one cache of the fleet's size could have found
at best, knowing the future (traces/fleet/bound.py); `of one LRU`: of what one cache of that size finds that gives up the
least recently used, as replicas do.

kv_cache_tester is three copies of each session (with contents of their own) that begin within two hours, gaps halved; a
session's next request comes when it has its answer and its gap is over. mooncake comes at its own times. Prompts' blocks are
shared, answers' are not (the traces do not say which blocks an answer fills), for the bound as for the replicas.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gateway.router.config import POLICIES, RouterConfig
from traces.fleet.bound import best_possible, one_lru
from traces.fleet.simulation import FleetConfig, FleetSimulation
from traces.importers.blocks import BlockTrace
from traces.importers.kv_cache_tester import read_kv_cache_tester
from traces.importers.mooncake import read_mooncake

REPLICAS = 8
COMPARED = ("prefix", "session", "longest_prefix", "least_load")


def measure(trace: BlockTrace, budget: str, policy: str) -> dict[str, float | str]:
    blocks = trace.working_set() // 4
    if budget == "fleet":
        blocks //= REPLICAS
    fleet = FleetConfig(REPLICAS, blocks, window=7200.0, pace=1.0 if trace.open_loop else 2.0)
    run = FleetSimulation(trace, fleet, RouterConfig(policy=policy)).run()
    prompts = [turn.request.digests for turn in run.turns]
    found = sum(turn.cached_tokens for turn in run.turns) / trace.block_size
    estimated = sum(abs(turn.estimated - turn.time_to_first_token) for turn in run.turns)
    return {
        "trace": trace.name,
        "caches": budget,
        "policy": policy,
        "cached share": round(run.cached_share, 4),
        "of bound": round(found / best_possible(prompts, blocks * REPLICAS), 4),
        "of one LRU": round(found / one_lru(prompts, blocks * REPLICAS), 4),
        "TTFT p50": round(run.time_to_first_token(0.5), 3),
        "TTFT p90": round(run.time_to_first_token(0.9), 3),
        "TTFT p99": round(run.time_to_first_token(0.99), 3),
        "busy": round(run.busy, 3),
        "estimate off by": round(estimated / sum(turn.time_to_first_token for turn in run.turns), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-cache-tester", type=Path, metavar="FOLDER", help="of trace_*.json")
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="conversation_trace.jsonl")
    parser.add_argument("--policy", action="append", choices=POLICIES, help=f"[default: {', '.join(COMPARED)}]")
    parser.add_argument("--caches", action="append", choices=("fleet", "each"), help="[default: both]")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    traces = []
    if arguments.kv_cache_tester is not None:
        traces.append(read_kv_cache_tester(arguments.kv_cache_tester, copies=3))
    if arguments.mooncake is not None:
        traces.append(read_mooncake(arguments.mooncake))
    if not traces:
        parser.error("name at least one trace: --kv-cache-tester or --mooncake")
    rows = []
    for trace in traces:
        for budget in arguments.caches or ("fleet", "each"):
            for policy in arguments.policy or COMPARED:
                row = measure(trace, budget, policy)
                if not rows and not arguments.json:
                    print("  ".join(f"{name:>15}" for name in row))
                rows.append(row)
                if not arguments.json:
                    print("  ".join(f"{value:>15}" for value in row.values()), flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
