import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.buckets import Buckets
from gateway.admission.limits import RateLimits
from gateway.admission.priority import ranked
from gateway.auth import Caller
from gateway.turn import SessionRef, Turn, TurnError


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def buckets(capacity=100):
    clock = Clock()
    return Buckets(capacity, clock=clock), clock


def test_a_minutes_worth_may_be_taken_at_once_and_comes_back_evenly():
    local, clock = buckets()
    assert [local.take("k", 1, 3).wait for _ in range(3)] == [0, 0, 0]
    assert local.take("k", 1, 3).wait == pytest.approx(20)
    clock.now += 19
    assert local.take("k", 1, 3).wait == pytest.approx(1)
    clock.now += 1
    assert local.take("k", 1, 3).wait == 0
    assert local.take("other", 1, 3).wait == 0


def test_more_than_a_minutes_worth_is_owed():
    local, clock = buckets()
    assert local.take("k", 250, 100).wait == 0
    assert local.level("k", 100) == -150
    assert local.take("k", 10, 100).wait == pytest.approx(96)
    clock.now += 96
    assert local.take("k", 10, 100).wait == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 200))), st.floats(1, 100))
def test_nobody_gets_more_than_a_minutes_worth_beyond_the_rate(requests, per_minute):
    local, clock = buckets()
    taken = largest = 0.0
    for passed, cost in requests:
        clock.now += passed
        if local.take("k", cost, per_minute).wait == 0:
            taken += cost
            largest = max(largest, cost)
    assert taken <= per_minute * (1 + clock.now / 60) + max(largest - per_minute, 0) + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 5))))
def test_buckets_are_bounded(requests):
    local, clock = buckets(capacity=3)
    for name, passed in requests:
        clock.now += passed
        local.take(name, 1, 10)
    assert len(local) <= 3


CALLER = Caller("tenant", "key", requests_per_minute=2, tokens_per_minute=1000)


async def test_limits_are_of_a_key_and_say_when_to_come_back():
    local, _ = buckets()
    limits = RateLimits(local)
    headers = await limits.request(CALLER)
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30.000s",
    }
    await limits.request(CALLER)
    with pytest.raises(TurnError, match="2 requests a minute") as raised:
        await limits.request(CALLER)
    assert (raised.value.status, raised.value.code, raised.value.retry_after) == (429, "rate_limit_exceeded", pytest.approx(30))
    assert limits.refused == {"requests": 1}
    assert await limits.request(Caller("tenant", "another", requests_per_minute=1))
    assert await limits.request(Caller("tenant", "unlimited")) == {}


async def test_tokens_are_settled_with_what_was_used():
    local, _ = buckets()
    limits = RateLimits(local)
    charge, headers = await limits.tokens(CALLER, 800)
    assert headers["x-ratelimit-remaining-tokens"] == "200"
    with pytest.raises(TurnError):
        await limits.tokens(CALLER, 300)
    await charge.settle(50)
    await charge.settle(50)
    assert local.level("tokens:key", 1000) == 950
    charge, _ = await limits.tokens(CALLER, 900)
    await charge.settle(1500)
    assert local.level("tokens:key", 1000) == -550


def turn(priority=0):
    return Turn("r", "m", SessionRef("", None), (), priority=priority)


@pytest.mark.parametrize(
    ("body", "header", "allowed", "given", "number"),
    [
        (0, "", "normal", "normal", 0),
        (-7, "", "high", "high", -7),
        (-7, "", "normal", "normal", 0),
        (-7, "", "low", "low", 1),
        (9, "", "normal", "low", 9),
        (0, "high", "high", "high", -1),
        (-5, "High", "high", "high", -5),
        (3, "high", "high", "high", -1),
        (0, "high", "normal", "normal", 0),
        (0, "low", "high", "low", 1),
        (9, "low", "low", "low", 9),
    ],
)
def test_priority_within_what_a_key_may_ask_for(body, header, allowed, given, number):
    got, name = ranked(turn(body), {"X-Turnkeep-Priority": header}, Caller("", priority=allowed))
    assert (name, got.priority) == (given, number)
    asked = header.lower() or ("high" if body < 0 else "low" if body else "normal")
    assert bool(got.warnings) == (asked != given)


def test_an_unknown_priority_is_a_sentence():
    with pytest.raises(TurnError, match="one of high, normal, low"):
        ranked(turn(), {"X-Turnkeep-Priority": "urgent"}, Caller(""))
