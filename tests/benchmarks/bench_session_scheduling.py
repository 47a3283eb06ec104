"""Twice as many sessions as device and host tier hold together, through the real scheduler, pool and door, on a virtual clock.

    python -m tests.benchmarks.bench_session_scheduling gpt-4o-airline.json miniswe/ [--sessions N] [--turns N] [--gap S]

TRACES are as those of `turnkeep bench offload`; their texts are bytes here, four to a token, which is about what a tokenizer
makes of them. 2 N sessions come to a host tier that holds the working set of N, over pools that hold 1, 1/2, 1/4 and 1/8 of it.
Against LRU, first come first served, computed again, with the pool alone. Only how long it takes depends on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from engine.bench.offload.replay import Outcome
from engine.bench.offload.virtual import Pace, replay_virtually, stand_in_prompts, virtual_config
from engine.bench.offload.virtual_tiers import VirtualTiers
from engine.bench.offload.workload import Session, largest, sessions_of, working_set
from engine.models.registry import LoadedModel, load_model
from prefix_cache.eviction import LRUPolicy
from tests.conftest import write_tiny_checkpoint
from traces.importers.texts import read_texts

BLOCK = 16
SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1_000_000,
}


def run(model: LoadedModel, sessions: list[Session], gap: float, blocks: int, host: int, *, ours: bool) -> Outcome:
    config = virtual_config(policy="sessions" if ours else "fcfs", max_draft_tokens=0)
    outcome, engine = replay_virtually(
        model,
        sessions,
        gap,
        config,
        blocks=blocks,
        hints=ours,
        pace=Pace(),
        eviction=None if ours else LRUPolicy(),
        make_tiers=(lambda clock: VirtualTiers(clock, max_blocks=host)) if ours and host else None,
    )
    engine.check_integrity()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--sessions", type=int, default=12, help="that fit")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--gap", type=float, default=3.0)
    arguments = parser.parse_args()
    histories = [(session.name, stand_in_prompts(session.additions)) for session in read_texts(arguments.traces)]
    settings = {"turns": arguments.turns, "output": 8, "gap": arguments.gap, "seed": 0}
    twice = sessions_of(histories, count=2 * arguments.sessions, **settings)
    whole, least = working_set(twice[: arguments.sessions], BLOCK), largest(twice, BLOCK)
    print(f"{len(twice)} sessions; {whole} blocks hold {arguments.sessions} of them, the largest turn takes {least}")
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_checkpoint(Path(folder), "llama", 0, "float32", None, SHAPE)
        model = load_model(Path(folder), dtype=torch.float32)
    for share in (1.0, 0.5, 0.25, 0.125):
        blocks = max(least, int(share * whole))
        rows = []
        for ours in (False, True):
            rows.append(one := run(model, twice, arguments.gap, blocks, whole, ours=ours))
            print(
                f"{share:6g} {blocks:6} {'sessions, host tier' if ours else 'LRU, FCFS':20} mean {one.mean_completion:8.1f} "
                f"p95 {one.completion(0.95):8.1f} TTFT p50 {one.first_token(0.5):7.2f} p99 {one.first_token(0.99):7.2f} "
                f"tokens/s {one.rate:7.0f} cached {one.cached_share:.1%} held {one.held} paused {one.pauses}",
                flush=True,
            )
        plain, mine = rows
        print(
            f"{share:6g} mean completion {plain.mean_completion / mine.mean_completion:.2f} x better, "
            f"throughput {mine.rate / plain.rate:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
