"""Time to the first token where the pool holds a part of the sessions, on a virtual clock.

    python -m tests.benchmarks.bench_device_pool gpt-4o-airline.json miniswe/ [--sessions N] [--turns N] [--gap S] [--within S]

Scheduler, pool, prefetching and decisions to load are the real ones. TRACES are as those of `turnkeep bench offload`; their
texts are bytes here, four to a token, which is about what a tokenizer makes of them. Three sides: an unlimited pool, a host
tier, and LRU that computes again. `--load-us` is what a block takes from the host tier, `--seeds` how often gaps are drawn; the
figures are means over those. Nothing depends on the machine but the time that the benchmark takes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.bench.offload.virtual import replay_virtually, stand_in_prompts, virtual_config
from engine.bench.offload.virtual_tiers import VirtualTiers
from engine.bench.offload.workload import Session, largest, sessions_of, working_set
from engine.models.registry import LoadedModel, load_model
from prefix_cache.eviction import LRUPolicy
from tests.conftest import write_tiny_checkpoint
from traces.importers.texts import read_texts

BLOCK = 16
SIDES = ("unlimited", "tiers", "LRU, computed again")


@dataclass(frozen=True)
class Figures:
    """Of one side and one draw of gaps. Seconds; blocks."""

    p50: float
    p90: float
    p99: float
    busy: float
    loaded: int
    fetched: int
    useful: int


def run(model: LoadedModel, sessions: list[Session], side: str, args: argparse.Namespace) -> Figures:
    needed, least = working_set(sessions, BLOCK), largest(sessions, BLOCK)
    blocks = needed + needed // 8 + least if side == SIDES[0] else max(least, int(args.share * needed))
    plain = side == SIDES[2]
    seconds = args.load_us / 1e6
    outcome, engine = replay_virtually(
        model,
        sessions,
        args.gap,
        virtual_config(policy="fcfs" if plain else "sessions", max_draft_tokens=0),
        blocks=blocks,
        hints=not plain,
        eviction=LRUPolicy() if plain else None,
        make_tiers=(lambda clock: VirtualTiers(clock, lambda _: seconds, seconds)) if side == SIDES[1] else None,
    )
    stats = engine.stats()
    return Figures(
        outcome.first_token(0.5),
        outcome.first_token(0.9),
        outcome.first_token(0.99),
        outcome.computing / outcome.seconds,
        sum(tier.hit_tokens_total // BLOCK for tier in stats.tiers),
        stats.fetched_blocks_total,
        stats.useful_fetches_total,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--gap", type=float, default=8.0)
    parser.add_argument("--within", type=float, default=24.0)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--load-us", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    histories = [(session.name, stand_in_prompts(session.additions)) for session in read_texts(args.traces)]
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1_000_000,
    }
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(Path(directory), "llama", 0, "float32", "1GB", shape)
        model = load_model(Path(directory), dtype=torch.float32)
    figures: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for seed in range(args.seeds):
        sessions = sessions_of(
            histories, count=args.sessions, turns=args.turns, output=8, gap=args.gap, seed=seed, within=args.within
        )
        for side in SIDES:
            figures[side].append(run(model, sessions, side, args))
    print(f"{'':20} {'TTFT p50':>9} {'p90':>7} {'p99':>7} {'busy':>5} {'loaded':>7} {'fetched':>8} {'useful':>7}")
    form = "{:9.3f} {:7.3f} {:7.3f} {:5.0%} {:7.0f} {:8.0f} {:7.0f}"
    for side, each in figures.items():
        mean = [float(np.mean([getattr(one, name) for one in each])) for name in Figures.__dataclass_fields__]
        print(f"{side:20}", form.format(*mean))
    whole, tiers, plain = figures.values()
    print("p50, of the unlimited pool's:", *(f"{ours.p50 / its.p50:.2f}" for ours, its in zip(tiers, whole, strict=True)))
    print("p99, times better than LRU:", *(f"{its.p99 / ours.p99:.1f}" for ours, its in zip(tiers, plain, strict=True)))


if __name__ == "__main__":
    main()
