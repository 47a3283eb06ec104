import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.gaps.histogram import MAX_SECONDS, RELATIVE_ERROR
from sessions.gaps.model import ALL_TOOLS, NO_TOOL, GapConfig, ToolGapModel
from sessions.gaps.waiting import Away, Waiting, away_elsewhere
from tests.shared_data import shared_traces


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def near(seconds):
    return pytest.approx(seconds, rel=RELATIVE_ERROR * 1.001)


@pytest.fixture
def model():
    return ToolGapModel(GapConfig(), clock=Clock())


def observe(model, tool, *gaps, tenant="t"):
    for gap in gaps:
        model.observe(tenant, [tool] if tool else [], gap)


def test_each_tool_has_its_own_gaps(model):
    observe(model, "grep", 0.1, 0.1, 0.2, 0.1, 0.3)
    observe(model, "pytest", 60, 70, 80, 300)
    observe(model, "", 600)
    quick, slow = model.predict("t", ["grep"]), model.predict("t", ["pytest"])
    assert (quick.p50, quick.p90, quick.basis) == (near(0.1), near(0.3), "tool")
    assert (slow.p50, slow.p90, slow.weight) == (near(70), near(300), 4)
    assert model.predict("t", []).p50 == near(600)
    rows = model.rows("t")
    assert [(row.tool, row.observed) for row in rows] == [("grep", 5), ("pytest", 4), (NO_TOOL, 1)]
    assert rows[1].p99 == near(300)
    assert [row.tool for row in model.rows("t", tool="pytest")] == ["pytest"]


def test_tenants_know_nothing_of_each_other(model):
    observe(model, "grep", *[5.0] * 10)
    assert model.predict("u", ["grep"]) is None
    assert model.rows("u") == []


def test_a_tool_that_is_new_is_expected_as_the_tenant_s_others(model):
    observe(model, "grep", *[2.0] * 10)
    assert model.predict("t", ["never seen"]).basis == "tenant"
    assert model.predict("t", ["never seen"]).p50 == near(2.0)
    observe(model, "rare", 500.0)  # once says little
    assert model.predict("t", ["rare"]).basis == "tenant"
    assert model.predict("t", []) is None  # people are not tools


def test_of_parallel_calls_the_slow_one_is_blamed_and_expected(model):
    observe(model, "read", *[0.1] * 5)
    observe(model, "build", *[100.0] * 5)
    for _ in range(20):
        assert model.observe("t", ["read", "build", "read"], 110.0) == ("build",)
    assert model.predict("t", ["read"]).p50 == near(0.1)
    assert model.predict("t", ["read", "build"]).p50 == near(110.0)
    assert model.observe("t", ["read", "deploy"], 200.0) == ("deploy",)


@pytest.mark.parametrize("gap", [-1.0, float("nan"), float("inf")])
def test_gaps_that_cannot_be_are_not_counted(model, gap):
    assert model.observe("t", ["grep"], gap) == ()
    assert model.rows("t") == []
    assert model.observe("t", ["grep"], 10 * MAX_SECONDS) == ("grep",)
    assert model.rows("t")[0].p50 == near(MAX_SECONDS)


def test_memory_is_bounded_by_names_of_all_and_of_one_tenant():
    model = ToolGapModel(GapConfig(max_tools=20, max_tools_per_tenant=8), clock=Clock())
    observe(model, "mine", 1.0, 1.0, 1.0, tenant="good")
    for number in range(1000):
        observe(model, f"made-up-{number}" * 100, 1.0, tenant="bad")
    assert len(model) <= 8 + 2
    assert model.predict("good", ["mine"]).basis == "tool"
    for number in range(1000):
        observe(model, "x", 1.0, tenant=f"tenant {number}")
    assert len(model) == 20
    assert all(len(name) <= 128 for _, name in model.names())


def test_a_hundred_calls_in_one_turn_are_looked_at_in_part(model):
    assert len(model.observe("t", [f"tool-{number}" for number in range(1000)], 1.0)) == 64


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 1000)), max_size=60), st.integers(0, 60))
def test_two_gateways_that_share_know_what_one_would(gaps, cut):
    """Each passes on what it saw; what comes back replaces what it knew."""
    alone = ToolGapModel(GapConfig(), clock=Clock())
    both = [ToolGapModel(GapConfig(), clock=Clock()) for _ in range(2)]
    shared: dict = {}
    for model in both:
        model.share()
    for number, (tool, gap) in enumerate(gaps):
        alone.observe("t", [tool], gap)
        both[number % 2].observe("t", [tool], gap)
        if number == cut:
            unsent = both[0].take_unsent()
            both[0].give_back(unsent)  # the first try failed
    for model in both:
        for key, buckets in model.take_unsent().items():
            for bucket, weight in buckets.items():
                of_key = shared.setdefault(key, {})
                of_key[bucket] = of_key.get(bucket, 0.0) + weight
    for model in both:
        for (tenant, tool), buckets in shared.items():
            model.replace(tenant, tool, buckets)
        assert [(row.tool, pytest.approx(row.weight), row.p50, row.p90) for row in model.rows("t")] == [
            (row.tool, row.weight, row.p50, row.p90) for row in alone.rows("t")
        ]


def test_what_nobody_takes_is_not_collected(model):
    observe(model, "grep", *[1.0] * 5)
    assert model.take_unsent() == {}
    model = ToolGapModel(GapConfig(max_tools=4), clock=Clock())
    model.share()
    for number in range(100):
        observe(model, f"tool {number}", 1.0)
    assert len(model.take_unsent()) <= 4
    assert {tool for _, tool in model.names()} >= {"tool 99", ALL_TOOLS}


def test_a_gap_is_from_the_end_of_a_turn_to_the_next_one():
    clock = Clock()
    waiting = Waiting(3, clock=clock, wall_clock=lambda: 5.0)
    waiting.ended("t", "s", ["grep"])
    clock.now += 12.5
    assert waiting.began("u", "s") is None
    assert waiting.began("t", "s") == Away(12.5, ("grep",), 5.0)
    assert waiting.began("t", "s") is None  # a second turn beside it is no gap
    for number in range(10):
        waiting.ended("t", f"s{number}", [])
    assert len(waiting) == 3
    assert waiting.began("t", "s0") is None
    waiting.closed("t", "s9")
    assert waiting.began("t", "s9") is None
    waiting.ended("t", "back", [])
    clock.now -= 3600
    assert waiting.began("t", "back") == Away(0.0, (), 5.0)


@pytest.mark.parametrize(
    ("ended_at", "seconds"),
    [(1000.0, 5.0), (1005.5, 0.0), (1007.0, None), (0.0, None), (1005.0 - 2 * MAX_SECONDS, None), (-50.0, None)],
)
def test_between_processes_the_wall_clock_is_believed_within_reason(ended_at, seconds):
    away = away_elsewhere(ended_at, 1005.0, ["grep"])
    assert away == (None if seconds is None else Away(seconds, ("grep",), ended_at))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"half_life": 0}, "gaps.half_life must be at least 1 second, not 0"),
        ({"half_life": float("nan")}, "gaps.half_life"),
        ({"max_tools": 0}, "gaps.max_tools must be at least 1, not 0"),
        ({"min_weight": -1}, "gaps.min_weight must be at least 0, not -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GapConfig(**fields)


def test_predictions_on_recorded_sessions_cover_what_they_say():
    """Gaps between the turns of recorded agents, in order: nine of ten come back before p90, and half before p50."""
    gaps = []
    for path in sorted(shared_traces("lmcache_agent_trace").glob("*/*.jsonl")):
        times = [json.loads(line)["timestamp"] / 1e6 for line in path.read_text().splitlines()]
        tool = path.parent.name
        gaps += [(tool, after - before) for before, after in itertools.pairwise(times) if after > before]
    assert len(gaps) > 100
    random.Random(3).shuffle(gaps)
    model = ToolGapModel(GapConfig(), clock=Clock())
    within = {"p50": 0, "p90": 0}
    predicted = 0
    for tool, gap in gaps:
        prediction = model.predict("t", [tool])
        if prediction is not None and prediction.weight >= 20:
            predicted += 1
            within["p50"] += gap <= prediction.p50
            within["p90"] += gap <= prediction.p90
        model.observe("t", [tool], gap)
    assert predicted > 80
    assert 0.38 <= within["p50"] / predicted <= 0.62
    assert 0.82 <= within["p90"] / predicted <= 0.98
