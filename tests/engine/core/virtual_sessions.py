"""Sessions for replays on a virtual clock."""

from __future__ import annotations

import numpy as np

from engine.bench.offload.workload import Session


def growing_sessions(
    count: int, seed: int, *, shared: int, first: int, growth: float, gap: float, begin_within: float
) -> list[Session]:
    """Contexts that all begin with the same `shared` tokens, have `first` of their own and grow by about `growth` a turn, in
    five to eight turns. Gaps have a mean of `gap` seconds; sessions begin within the first `begin_within`."""
    generator = np.random.default_rng(seed)
    made = []
    system = generator.integers(3, 300, shared).astype(np.uint32)
    for number in range(count):
        turns = int(generator.integers(5, 9))
        ends = first + np.cumsum(generator.exponential(growth, turns).astype(int) + 32)
        tokens = np.concatenate([system, generator.integers(3, 300, int(ends[-1])).astype(np.uint32)])
        gaps = (float(generator.uniform(0, begin_within)), *generator.exponential(gap, turns - 1).tolist())
        made.append(Session(f"s{number}", tuple(tokens[: int(end)] for end in ends), (8,) * turns, gaps))
    return made
