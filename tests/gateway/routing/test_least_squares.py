import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.least_squares import FadingMoments

SIZE = 4
value = st.floats(-3, 3).map(lambda number: round(number, 2))
observation = st.tuples(st.lists(value, min_size=SIZE, max_size=SIZE), value, st.floats(0.01, 100))


def by_hand(observations, fade, prior, strength):
    """The unconstrained fit: every observation a row of the design, as much as is left of it."""
    left = [weight * fade ** (len(observations) - 1 - number) for number, (_, _, weight) in enumerate(observations)]
    rows = np.array([row for row, _, _ in observations]).reshape(-1, SIZE)
    targets = np.array([target for _, target, _ in observations])
    moments = rows.T @ np.diag(left) @ rows + np.diag(strength)
    return np.linalg.solve(moments, rows.T @ (np.array(left) * targets) + np.array(strength) * prior), moments


@settings(max_examples=80, deadline=None)
@given(st.lists(observation, max_size=30), st.sampled_from([0.9, 0.97, 1.0]))
def test_the_fit_is_that_of_the_normal_equations(observations, fade):
    prior, strength = [0.5, 1.0, 2.0, 0.1], [1.0, 0.5, 2.0, 10.0]
    fit = FadingMoments(SIZE, fade)
    for row, target, weight in observations:
        fit.add(row, target, weight)
    expected, _ = by_hand(observations, fade, prior, strength)
    assert fit.solve(prior, strength, [-math.inf] * SIZE if not observations else [-1e6] * SIZE) == pytest.approx(
        list(expected), rel=1e-5, abs=1e-5
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(observation, min_size=1, max_size=30))
def test_nothing_lies_below_its_least_and_what_lies_above_is_no_worse_for_it(observations):
    prior, strength, least = [0.5, 1.0, 2.0, 0.1], [1.0, 0.5, 2.0, 10.0], [0.0, 0.1, 0.2, 0.01]
    fit = FadingMoments(SIZE, 0.97)
    for row, target, weight in observations:
        fit.add(row, target, weight)
    found = fit.solve(prior, strength, least)
    assert all(value >= bound - 1e-12 for value, bound in zip(found, least, strict=True))
    _, moments = by_hand(observations, 0.97, prior, strength)
    left = [weight * 0.97 ** (len(observations) - 1 - number) for number, (_, _, weight) in enumerate(observations)]
    rows, targets = np.array([row for row, _, _ in observations]), np.array([target for _, target, _ in observations])
    right = rows.T @ (np.array(left) * targets) + np.array(strength) * prior
    slope = moments @ np.array(found) - right
    # Where a coefficient is free, the error does not fall in any direction.
    for number, value in enumerate(found):
        if value > least[number] + 1e-9:
            assert slope[number] == pytest.approx(
                0.0, abs=1e-5 * max(1.0, float(np.abs(moments).max()), float(np.abs(right).max()))
            )


def test_it_may_go_on_for_ever():
    rng = random.Random(1)
    fit = FadingMoments(2, 0.9)
    for _ in range(20_000):
        x = rng.random()
        fit.add((1.0, x), 3.0 + 2.0 * x, 1.0)
    assert fit.solve([1.0, 1.0], [1e-6, 1e-6], [0.0, 0.0]) == pytest.approx([3.0, 2.0], rel=1e-4)
    for _ in range(500):
        fit.add((1.0, 0.0), 5.0, 1.0)
    # What is not seen any more fades until the prior is all there is.
    assert fit.solve([1.0, 1.0], [1e-6, 1e-6], [0.0, 0.0]) == pytest.approx([5.0, 1.0], rel=1e-3)
