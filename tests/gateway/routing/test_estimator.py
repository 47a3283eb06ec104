import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.estimator import STEP_TOKENS, Coefficients, Observation, PrefillEstimator

PROBES = [
    Observation(new, context, decoding, 0.0)
    for new in (50, 300, 2000, 20_000)
    for context in (0, 60_000)
    for decoding in (0, 10)
]


def truth(speed, seen):
    own = 0.006 + 3e-5 * seen.new + 2e-9 * seen.new * (seen.context + seen.new / 2)
    return speed * (own + 8e-5 * seen.decoding * (1 + seen.new / STEP_TOKENS) + 1e-5 * seen.host)


def estimate(estimator, seen):
    k = estimator.coefficients
    return k.work(seen.new, seen.context) + k.overhead(seen.decoding, seen.new) + k.host * seen.host


def some(rng, speed, noise=0.1, host=False):
    seen = Observation(rng.choice([50, 300, 2000, 20_000]), rng.choice([0, 3000, 60_000]), rng.randrange(20), 0.0)
    lifted = rng.choice([0, 1000, 8000]) if host else 0
    seconds = truth(speed, Observation(seen.new, seen.context, seen.decoding, 0.0, lifted)) * rng.uniform(1 - noise, 1 + noise)
    return Observation(seen.new, seen.context, seen.decoding, seconds, lifted)


def worst(estimator, speed):
    return max(abs(estimate(estimator, probe) / truth(speed, probe) - 1) for probe in PROBES)


@pytest.mark.parametrize("speed", [0.1, 1.0, 100.0])
def test_any_machine_is_learned_from_few_requests_outliers_or_not(speed):
    rng = random.Random(1)
    estimator = PrefillEstimator()
    for _ in range(30):
        estimator.observe(some(rng, speed))
    assert worst(estimator, speed) < 0.2
    for number in range(100):
        seen = some(rng, speed)
        estimator.observe(Observation(seen.new, seen.context, seen.decoding, seen.seconds * (50 if number % 20 == 0 else 1)))
    assert worst(estimator, speed) < 0.25
    assert estimator.error < 0.5


def test_one_request_tells_a_slow_machine_from_a_fast_one():
    estimator = PrefillEstimator()
    estimator.observe(Observation(1000, 0, 0, 5.0))
    assert estimate(estimator, Observation(1000, 0, 0, 0.0)) == pytest.approx(5.0, rel=0.01)
    assert 2.0 < estimate(estimator, Observation(500, 0, 0, 0.0)) < 5.0


def test_a_machine_that_changes_is_followed():
    rng = random.Random(2)
    estimator = PrefillEstimator()
    for speed in (1.0, 8.0, 0.5):
        for _ in range(200):
            estimator.observe(some(rng, speed))
        assert worst(estimator, speed) < 0.3


def test_what_never_happens_stays_at_its_prior_whatever_is_repeated():
    estimator = PrefillEstimator()
    for _ in range(5000):
        estimator.observe(Observation(100, 0, 0, 0.015))
    assert all(math.isfinite(value) and 0 <= value < 1 for value in estimator.coefficients)
    # 100 tokens in 15 ms fit the prior's shape, so the rest of it has kept that shape.
    prior = Coefficients()
    assert estimator.coefficients.host / prior.host == pytest.approx(estimator.coefficients.remote / prior.remote, rel=1e-6)
    assert 0.5 < estimator.coefficients.disk / prior.disk < 2


def test_the_price_of_a_tier_is_learned():
    rng = random.Random(4)
    estimator = PrefillEstimator()
    for _ in range(200):
        estimator.observe(some(rng, 1.0, host=True))
    assert estimator.coefficients.host == pytest.approx(1e-5, rel=0.3)


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 5000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 200_000), st.integers(-5, 200_000), st.integers(-1, 500), numbers), max_size=40))
def test_no_report_breaks_it(reports):
    estimator = PrefillEstimator()
    for new, context, decoding, seconds in reports:
        estimator.observe(Observation(new, context, decoding, seconds))
        assert all(math.isfinite(value) and value >= 0 for value in estimator.coefficients)
        assert math.isfinite(estimator.error)


def test_a_token_is_never_free():
    rng = random.Random(5)
    estimator = PrefillEstimator()
    for _ in range(300):
        # Noise that has nothing to do with the prompt, on a machine that does too much.
        estimator.observe(
            Observation(rng.choice([16, 200, 900]), rng.choice([0, 400]), rng.randrange(8), rng.uniform(0.01, 1.0))
        )
    assert estimator.coefficients.token > 4e-5
