"""What is kept is loaded where that is faster, and never makes anybody much slower.

On a virtual clock, with the engine's own decisions.
"""

import numpy as np
import pytest
from virtual_sessions import growing_sessions

from engine.bench.offload.virtual import Pace, replay_virtually, virtual_config
from engine.bench.offload.virtual_tiers import VirtualTiers
from engine.bench.offload.workload import working_set

COMPUTED = 16 * Pace().token
"""Seconds that a block takes to compute, at least."""


@pytest.fixture(scope="module")
def sessions():
    """Contexts of two thousand tokens."""
    return growing_sessions(10, 3, shared=200, first=1600, growth=120, gap=6.0, begin_within=24.0)


def side(smallest, sessions, share: float, make_tiers=None, policy: str = "fcfs"):
    blocks = int(share * working_set(sessions, 16))
    config = virtual_config(max_draft_tokens=0, policy=policy)
    outcome, engine = replay_virtually(smallest, sessions, 6.0, config, blocks=blocks, hints=True, make_tiers=make_tiers)
    engine.check_integrity()
    assert len(outcome.completions) == len(sessions)
    return outcome, engine


@pytest.fixture(scope="module")
def computed(smallest, sessions):
    """By policy. With `sessions` turns wait at the door for room, which a tier has more of."""
    return {policy: side(smallest, sessions, 0.25, policy=policy)[0] for policy in ("fcfs", "sessions")}


TIERS = {
    "as slow as computing": (lambda now: COMPUTED, COMPUTED),
    "four times as slow": (lambda now: 4 * COMPUTED, 4 * COMPUTED),
    "four times as slow, and believed fast": (lambda now: 4 * COMPUTED, COMPUTED / 40),
    "stands still now and then": (lambda now: 1.0 if now % 10 > 5 else COMPUTED / 40, COMPUTED / 40),
    "stands still": (lambda now: 1e6, COMPUTED / 40),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *(("fcfs", name) for name in TIERS),
        # Here the door counts on the tier until it has learned better, so only those that are what they are believed to be.
        ("sessions", "as slow as computing"),
        ("sessions", "four times as slow"),
    ],
)
def test_no_tier_costs_more_than_a_twentieth_however_slow_it_is(smallest, sessions, computed, policy, name):
    seconds, believed = TIERS[name]
    make_tiers = lambda clock: VirtualTiers(clock, seconds, 1e-4, believed)  # noqa: E731
    outcome, _ = side(smallest, sessions, 0.25, make_tiers, policy)
    plain = computed[policy]
    ratio = float(np.mean(outcome.first_tokens) / np.mean(plain.first_tokens))
    assert ratio <= 1.05
    assert outcome.mean_completion <= 1.05 * plain.mean_completion
    assert outcome.seconds <= 1.05 * plain.seconds


def test_a_fast_tier_is_worth_nearly_as_much_as_a_pool_that_holds_all(smallest, sessions, computed):
    unlimited, _ = side(smallest, sessions, 1.5)
    outcome, engine = side(smallest, sessions, 0.25, lambda clock: VirtualTiers(clock, lambda _: 6e-5, 6e-5, 6e-5))
    assert outcome.cached_tokens >= 0.99 * unlimited.cached_tokens
    assert outcome.first_token(0.5) <= 1.3 * unlimited.first_token(0.5)
    assert computed["fcfs"].first_token(0.99) >= 3 * outcome.first_token(0.99)
    stats = engine.stats()
    assert stats.lost_blocks_total == 0
    assert stats.fetched_blocks_total > 0
    assert stats.useful_fetches_total + stats.useless_fetches_total == stats.fetched_blocks_total
