import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.gaps.histogram import (
    MAX_SECONDS,
    MIN_SECONDS,
    NUM_BUCKETS,
    RELATIVE_ERROR,
    DecayedHistogram,
    bucket_of,
    bucket_seconds,
)
from tests.shared_data import shared_traces

HOUR = 3600.0
durations = st.floats(0, 10 * MAX_SECONDS)
clamped = st.floats(MIN_SECONDS, MAX_SECONDS)


def exact(values, share):
    """The smallest value with at least this share of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


@settings(deadline=None)
@given(clamped)
def test_a_bucket_stands_for_what_is_in_it(seconds):
    bucket = bucket_of(seconds)
    assert 0 <= bucket < NUM_BUCKETS
    assert bucket_seconds(bucket) == pytest.approx(seconds, rel=RELATIVE_ERROR * 1.001)


@settings(deadline=None)
@given(st.lists(clamped, min_size=1, max_size=60), st.lists(st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.99, 1.0]), max_size=4))
def test_quantiles_are_right_within_the_error(values, shares):
    histogram = DecayedHistogram(HOUR, 0.0)
    for value in values:
        histogram.add(value, 0.0)
    shares = sorted(shares)
    found = histogram.quantiles(shares)
    for share, seconds in zip(shares, found, strict=True):
        assert seconds == pytest.approx(exact(values, share), rel=RELATIVE_ERROR * 1.001)
    assert histogram.weight(0.0) == pytest.approx(len(values))


@settings(deadline=None)
@given(st.lists(st.tuples(durations, st.floats(0, 1e9)), max_size=40), st.randoms(use_true_random=False))
def test_however_it_is_cut_and_merged_it_says_the_same(values, order):
    whole, left, right = (DecayedHistogram(HOUR, 0.0) for _ in range(3))
    values.sort(key=lambda item: item[1])
    for seconds, at in values:
        whole.add(seconds, at)
        (left if order.random() < 0.5 else right).add(seconds, at)
    now = 1e9
    merged = DecayedHistogram(HOUR, now)
    merged.merge(right.buckets(now), now)
    merged.merge(left.buckets(now), now)
    one, other = whole.buckets(now), merged.buckets(now)
    for bucket in one.keys() | other.keys():
        assert one.get(bucket, 0.0) == pytest.approx(other.get(bucket, 0.0), rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(clamped, st.floats(-1e6, 1e6)), min_size=1, max_size=40))
def test_a_clock_that_jumps_breaks_nothing(values):
    histogram = DecayedHistogram(HOUR, 0.0)
    for seconds, at in values:
        histogram.add(seconds, at)
    low, high = histogram.quantiles((0.0, 1.0))
    assert min(v for v, _ in values) * (1 - 2 * RELATIVE_ERROR) <= low <= high
    assert high <= max(v for v, _ in values) * (1 + 2 * RELATIVE_ERROR)
    assert 0 < histogram.weight(-5.0) <= len(values) + 1e-6


def test_the_recent_past_counts_most():
    histogram = DecayedHistogram(HOUR, 0.0)
    for _ in range(1000):
        histogram.add(2.0, 0.0)
    assert histogram.weight(HOUR) == pytest.approx(500)
    for _ in range(20):
        histogram.add(60.0, 10 * HOUR)  # a thousand old ones weigh 0.98 by now
    median, high = histogram.quantiles((0.5, 0.9))
    assert (median, high) == pytest.approx((60.0, 60.0), rel=RELATIVE_ERROR)
    assert histogram.weight(10 * HOUR) == pytest.approx(20.98, abs=0.01)


def test_years_pass():
    histogram = DecayedHistogram(1.0, 0.0)
    for day in range(3000):
        histogram.add(1.0 + day % 2, day * 86_400.0)
    assert histogram.weight(2999 * 86_400.0) == pytest.approx(1.0)
    assert histogram.quantiles((0.5,))[0] == pytest.approx(2.0, rel=RELATIVE_ERROR)


def test_nothing_is_said_of_nothing_and_nonsense_is_refused():
    histogram = DecayedHistogram(HOUR, 0.0)
    assert histogram.quantiles((0.5,)) is None
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            histogram.add(value, 0.0)
    histogram.merge({-1: 5.0, NUM_BUCKETS: 5.0, 3: math.nan, 4: math.inf, 5: -1.0}, 0.0)
    assert histogram.quantiles((0.5,)) is None


def test_gaps_of_recorded_coding_agents():
    folder = shared_traces("kv_cache_tester")
    gaps = []
    for path in sorted(folder.glob("*.json")):
        requests = json.loads(path.read_text())["requests"]
        gaps += [after["think_time"] for before, after in itertools.pairwise(requests) if "think_time" in after]
    gaps = [max(gap, MIN_SECONDS) for gap in gaps]
    assert len(gaps) > 500
    histogram = DecayedHistogram(HOUR, 0.0)
    for gap in gaps:
        histogram.add(gap, 0.0)
    shares = (0.25, 0.5, 0.9, 0.99)
    for share, seconds in zip(shares, histogram.quantiles(shares), strict=True):
        assert seconds == pytest.approx(exact(gaps, share), rel=RELATIVE_ERROR * 1.001)


@settings(deadline=None)
@given(
    st.lists(st.tuples(durations, st.floats(0, 1e6)), max_size=30).map(lambda values: sorted(values, key=lambda item: item[1])),
    st.lists(st.floats(0, 1), min_size=1, max_size=4).map(sorted),
)
def test_quantiles_are_those_of_adding_up_bucket_by_bucket(values, shares):
    histogram = DecayedHistogram(HOUR, 0.0)
    for seconds, at in values:
        histogram.add(seconds, at)
    weights = dict(histogram.buckets(1e6))
    expected = []
    for share in shares:
        below, found = 0.0, None
        for bucket in sorted(weights):
            below += weights[bucket]
            found = bucket
            if below >= share * math.fsum(weights.values()) * (1 - 1e-12):
                break
        expected.append(found)
    found = histogram.quantiles(shares)
    assert (found is None) == (not values)
    if values:
        for bucket, seconds in zip(expected, found, strict=True):
            assert bucket_seconds(bucket - 1) < seconds <= bucket_seconds(bucket + 1)
