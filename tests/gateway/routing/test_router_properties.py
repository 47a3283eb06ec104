"""What holds in every situation, and that what the router remembers is bounded."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_cluster import Cluster, tokens

from gateway.router.config import POLICIES, RouterConfig
from gateway.router.costs import Candidate, Weights, cheapest, costs
from gateway.router.memory import Homes
from gateway.router.peers import Peers
from gateway.router.policies import RouteRequest, make_policy
from gateway.router.standing import Standing


def test_memory_is_bounded_under_any_session_names():
    cluster = Cluster("ab", max_homes=50, max_predicted_blocks=200)
    for number in range(500):
        cluster.route(tokens(100, number), f"session-{number}")
        cluster.route(tokens(100, 10_000 + number))
    assert len(cluster.router._homes) == 50
    assert cluster.index.predicted_blocks <= 200


def test_homes_forget_the_least_recent_and_the_old():
    homes = Homes(2, ttl=10)
    homes.put("a", "w", 0)
    homes.put("b", "w", 1)
    homes.put("a", "w", 2)
    homes.put("c", "w", 3)
    assert homes.get("b", 3) is None
    assert homes.get("a", 12) == "w"
    assert homes.get("a", 12.5) is None
    assert len(homes) == 1


def test_recent_work_halves():
    standing = Standing("a", Peers(), 60, 0.0)
    standing.worked(100, 0, 0)
    assert standing.recent_work(60) == pytest.approx(50)
    standing.worked(10, 0, 120)
    assert standing.recent_work(120) == pytest.approx(35)
    # A clock that goes back makes nothing grow.
    assert standing.recent_work(0) == pytest.approx(35)


def test_a_forgotten_worker_is_not_remembered_by_late_news():
    cluster = Cluster("ab")
    route = cluster.route(tokens(100, 0), "s")
    name = route.receipt.worker
    cluster.router.forget(name)
    route.computed(0)
    cluster.router.generated(name, 50)
    assert cluster.router.standings().keys() == set("ab") - {name}


@pytest.mark.parametrize("wrong", [{"policy": "x"}, {"spread": -1}, {"hysteresis": float("nan")}, {"max_homes": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="router"):
        RouterConfig(**wrong)


seconds = st.floats(0, 1000)


@st.composite
def situations(draw):
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=8, unique=True))
    prompt = draw(st.integers(1, 100_000))
    candidates = [
        Candidate(
            name,
            matched_tokens=draw(st.integers(0, prompt)),
            queue=draw(seconds),
            transfer=draw(seconds),
            prefill=draw(seconds),
            interference=draw(seconds),
            eviction=draw(seconds),
            recent_work=draw(seconds),
            stay=100.0,
            idle_rank=draw(st.integers(0, 5)),
        )
        for name in names
    ]
    home = draw(st.sampled_from([None, *"abcdefgh"]))
    return prompt, candidates, home


TERMS = ("queue", "transfer", "prefill", "interference", "others", "eviction", "recent_work")


@settings(max_examples=300, deadline=None)
@given(situations())
def test_no_worker_is_chosen_that_another_beats_in_everything(situation):
    _, candidates, home = situation
    chosen = cheapest(candidates, home, Weights())
    for other in candidates:
        assert chosen.name == home or not all(1.03 * getattr(other, term) + 0.001 < getattr(chosen, term) for term in TERMS)


@settings(max_examples=300, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_the_choice_depends_on_nothing_but_the_situation(situation, rng):
    prompt, candidates, home = situation
    for name in POLICIES:
        if name == "random":
            continue
        policy = make_policy(name, RouterConfig())
        request = RouteRequest(prompt, ("t", "s"), home)
        first = policy.choose(request, candidates)
        shuffled = list(candidates)
        rng.shuffle(shuffled)
        assert policy.choose(request, shuffled) == first


@settings(max_examples=200, deadline=None)
@given(situations(), st.sampled_from(TERMS))
def test_more_seconds_never_attract(situation, term):
    _, candidates, home = situation
    heavier = [candidate._replace(**{term: getattr(candidate, term) + 1.0}) for candidate in candidates]
    before, after = costs(candidates, home, Weights()), costs(heavier, home, Weights())
    assert all(old <= new for old, new in zip(before, after, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 50), st.integers(0, 100_000))
def test_a_longer_match_never_repels(shorter, longer, requests, queued):
    cluster = Cluster("ab", spread=0)
    prompt = tokens(500, 0)
    for name, held in (("a", min(shorter, longer)), ("b", max(shorter, longer))):
        cluster.store(name, prompt[:held])
        cluster.busy(name, queued=queued, requests=requests)
    rows = {name: sum(terms[t] for t in TERMS) for name, _, terms in cluster.route(prompt, "s").decision.candidates()}
    assert rows["b"] <= rows["a"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_to_routes_nothing_stays_expected(data):
    cluster = Cluster("abc", policy=data.draw(st.sampled_from(POLICIES)), max_predicted_blocks=500)
    open_routes = []
    for step in itertools.count():
        if step > 40 or (step > 5 and data.draw(st.integers(0, 20)) == 0):
            break
        action = data.draw(st.sampled_from(["route", "route", "computed", "failed", "abandoned", "time", "lose"]))
        if action == "route":
            prompt = tokens(data.draw(st.sampled_from([0, 5, 100, 300])), data.draw(st.integers(0, 5)))
            route = cluster.route(prompt, data.draw(st.sampled_from([None, "s", "t"])))
            assert route.receipt.worker in cluster.loads
            assert route.receipt.matched_tokens <= len(prompt)
            open_routes.append(route)
        elif action == "time":
            cluster.now += data.draw(st.floats(0, 10))
        elif action == "lose":
            name = data.draw(st.sampled_from("abc"))
            cluster.index.remove_worker(name)
            cluster.router.forget(name)
            cluster.sequence[name] = 0
        elif open_routes:
            route = data.draw(st.sampled_from(open_routes))
            getattr(route, action)(*((0,) if action == "computed" else ()))
    for route in open_routes:
        route.abandoned()
    cluster.index.expire(cluster.now + 100)
    assert cluster.index.predicted_blocks == 0
