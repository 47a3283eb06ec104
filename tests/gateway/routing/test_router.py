import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.config import POLICIES, RouterConfig
from gateway.router.costs import Candidate, WorkerLoad, cheapest, cost, pressure
from gateway.router.memory import Homes, RecentWork
from gateway.router.policies import RouteRequest, SessionPolicy, make_policy
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import block_digests, join_digests
from prefix_cache.index import ResidencyIndex

ROOT = bytes(16)
BLOCK = 16


class Cluster:
    """A router over workers that compute what they are given and tell the index at once."""

    def __init__(self, names, **config):
        self.now = 0.0
        settings = RouterConfig(**config)
        self.index = ResidencyIndex(settings.max_indexed_blocks, settings.max_predicted_blocks)
        self.router = Router(settings, self.index, lambda: self.now)
        self.loads = {name: WorkerLoad(name, max_concurrency=64) for name in names}
        self.sequence = dict.fromkeys(names, 0)
        for name in names:
            self.index.apply(name, Snapshot("i", 0, {}))

    def route(self, tokens, session=None, exclude=()):
        return self.router.route(
            digests=block_digests(tokens, ROOT, BLOCK),
            prompt_tokens=len(tokens),
            block_size=BLOCK,
            session=SessionRef("t", session),
            loads=[load for name, load in self.loads.items() if name not in exclude],
        )

    def store(self, name, tokens):
        self.sequence[name] += 1
        digests = join_digests(block_digests(tokens, ROOT, BLOCK))
        self.index.apply(name, EventBatch("i", self.sequence[name], (BlocksStored(digests, ROOT),)))

    def run(self, tokens, session=None):
        """A whole turn, nothing beside it."""
        route = self.route(tokens, session)
        route.computed(route.receipt.matched_tokens)
        self.store(route.receipt.worker, tokens)
        return route.receipt

    def busy(self, name, queued=0, requests=0):
        self.loads[name] = replace(self.loads[name], queued_tokens=queued, requests=requests)


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def test_a_session_stays_where_its_prefix_is():
    cluster = Cluster("abc")
    for seed in range(9):
        history = tokens(500, seed)
        first = cluster.run(history, f"s{seed}").worker
        for turn in range(6):
            history = history + tokens(200, 1000 + seed * 10 + turn)
            receipt = cluster.run(history, f"s{seed}")
            assert receipt.worker == first
            assert receipt.reason == "prefix"
            assert receipt.matched_tokens >= len(history) - 200 - BLOCK


def test_a_session_without_a_name_stays_too():
    cluster = Cluster("ab")
    for seed in range(6):
        history = tokens(500, seed)
        first = cluster.run(history).worker
        cluster.busy(first, queued=400)
        for turn in range(3):
            history = history + tokens(100, 1000 + seed * 10 + turn)
            assert cluster.run(history).worker == first
        cluster.busy(first)


def test_a_miss_goes_to_the_least_loaded_not_to_the_emptiest_cache():
    cluster = Cluster("abc")
    for seed in range(20):
        cluster.store("a", tokens(1000, 500 + seed))
        cluster.store("b", tokens(1000, 600 + seed))
    # c has the emptiest cache, because it is the one that cannot keep up.
    cluster.busy("c", queued=20_000, requests=30)
    cluster.busy("b", queued=500, requests=2)
    for seed in range(5):
        assert cluster.route(tokens(800, seed), f"s{seed}").receipt.worker == "a"


def test_imbalance_does_not_discard_affinity_late_in_a_conversation():
    cluster = Cluster("ab")
    history = tokens(60_000, 1)
    home = cluster.run(history, "long").worker
    cluster.busy(home, queued=100_000, requests=40)
    receipt = cluster.run(history + tokens(500, 2), "long")
    assert (receipt.worker, receipt.reason) == (home, "prefix")
    # It leaves when waiting costs more than computing everything elsewhere, and not before.
    cluster.busy(home, queued=160_000, requests=40)
    moved = cluster.route(history + tokens(500, 2), "long").receipt
    assert moved.worker != home
    assert moved.reason == "load"


def test_a_shared_system_prompt_does_not_funnel_everybody():
    cluster = Cluster("abcd")
    system = tokens(4000, 0)
    count = dict.fromkeys("abcd", 0)
    for seed in range(80):
        history = system + tokens(300, 1 + seed)
        worker = cluster.run(history, f"s{seed}").worker
        count[worker] += 1
        for turn in range(4):
            history = history + tokens(400, 1000 + seed * 10 + turn)
            assert cluster.run(history, f"s{seed}").worker == worker
        cluster.now += 1.0
    assert min(count.values()) >= 10
    assert max(count.values()) <= 35


def test_births_spread_even_when_one_request_runs_at_a_time():
    cluster = Cluster("ab")
    system = tokens(1000, 0)
    workers = []
    for seed in range(30):
        receipt = cluster.run(system + tokens(500, 1 + seed), f"s{seed}")
        workers.append(receipt.worker)
    assert 10 <= workers.count("a") <= 20
    # The prefix is computed once more for each further worker, and not again.
    assert sum(worker != workers[0] for worker in workers[:3]) <= 1


def test_siblings_go_together_until_the_queue_eats_the_saving():
    cluster = Cluster("ab")
    context = tokens(8000, 0)
    chosen = []
    for child in range(60):
        prompt = context + tokens(200, 1 + child)
        route = cluster.route(prompt, f"child-{child}")
        name = route.receipt.worker
        chosen.append(name)
        load = cluster.loads[name]
        work = len(prompt) - route.receipt.matched_tokens
        cluster.busy(name, load.queued_tokens + work, load.requests + 1)
    first = chosen[0]
    together = next(position for position, name in enumerate(chosen) if name != first)
    assert together >= 10
    assert "a" in chosen
    assert "b" in chosen
    # After the split both hold the context, and the rest is balanced.
    assert abs(chosen[together:].count("a") - chosen[together:].count("b")) <= 2 + together


def test_a_sibling_of_a_turn_that_was_given_up_expects_nothing():
    cluster = Cluster("ab")
    prompt = tokens(1000, 0)
    route = cluster.route(prompt, "x")
    assert cluster.route(prompt, "y").receipt.matched_tokens == 1000 - 1000 % BLOCK
    route.abandoned()
    assert cluster.index.predicted_blocks == 0
    assert cluster.route(prompt, "z").receipt.matched_tokens == 0


def test_predictions_last_until_computed_and_a_little_longer():
    cluster = Cluster("ab", predicted_ttl=5.0)
    prompt = tokens(160, 0)
    route = cluster.route(prompt, "x")
    cluster.now = 1000.0
    assert cluster.route(prompt, "y").receipt.matched_tokens == 160
    route.computed(0)
    cluster.now = 1004.0
    assert cluster.route(prompt, "y").receipt.matched_tokens == 160
    cluster.now = 1006.0
    assert cluster.route(prompt, "y").receipt.matched_tokens == 0


def test_after_a_failure_the_session_is_not_at_home_there():
    cluster = Cluster("ab")
    history = tokens(500, 0)
    route = cluster.route(history, "s")
    name = route.receipt.worker
    route.failed()
    again = cluster.route(history, "s", exclude=(name,))
    assert again.receipt.worker != name
    assert again.receipt.reason == "only"
    again.computed(0)
    cluster.store(again.receipt.worker, history)
    cluster.busy(name, requests=0)
    assert cluster.route(history + tokens(50, 1), "s").receipt.worker == again.receipt.worker


def test_equal_workers_take_turns():
    cluster = Cluster("abc", spread=0)
    workers = [cluster.run(tokens(100, seed), f"s{seed}").worker for seed in range(9)]
    assert sorted(workers[:3]) == sorted(workers[3:6]) == sorted(workers[6:]) == list("abc")


def test_hysteresis_keeps_a_session_home_when_its_kv_is_gone():
    cluster = Cluster("ab")
    prompt = tokens(1000, 0)
    home = cluster.route(prompt, "s").receipt.worker
    for prediction in list(cluster.index._open):
        cluster.index.retract(prediction)
    cluster.busy(home, queued=240)
    receipt = cluster.route(prompt, "s").receipt
    assert (receipt.worker, receipt.reason) == (home, "home")
    for prediction in list(cluster.index._open):
        cluster.index.retract(prediction)
    cluster.busy(home, queued=260)
    assert cluster.route(prompt, "s").receipt.worker != home


def test_beyond_max_concurrency_a_worker_is_full():
    config = RouterConfig()
    free = WorkerLoad("a", requests=3, max_concurrency=4)
    full = WorkerLoad("b", requests=4, max_concurrency=4)
    assert pressure(full, config) - pressure(free, config) == config.running_weight + config.overflow_weight


def test_sessions_are_matched_exactly():
    policy = SessionPolicy(RouterConfig())
    candidates = [Candidate(WorkerLoad(name), 0, 0.0, 0) for name in "abcdefgh"]

    def chosen(tenant, key):
        return policy.choose(RouteRequest(10, (tenant, key)), candidates)[0].name

    # Pairs that a careless concatenation, prefix match or separator would confuse.
    pairs = [("t", f"session-{n}") for n in range(40)] + [("t1", "x"), ("t", "1x"), ("t|", "x"), ("t", "|x"), ("", "t1x")]
    assert len({chosen(*pair) for pair in pairs}) == 8
    homes = Homes(100, 1000)
    for number, pair in enumerate(pairs):
        homes.put(pair, f"w{number}", 0.0)
    assert [homes.get(pair, 0.0) for pair in pairs] == [f"w{number}" for number in range(len(pairs))]


def test_a_lost_worker_moves_only_its_own_sessions():
    policy = SessionPolicy(RouterConfig())
    every = [Candidate(WorkerLoad(name), 0, 0.0, 0) for name in "abcde"]
    requests = [RouteRequest(10, ("t", f"s{n}")) for n in range(300)]
    before = [policy.choose(request, every)[0].name for request in requests]
    after = [policy.choose(request, [c for c in every if c.name != "c"])[0].name for request in requests]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "c")
    assert min(before.count(name) for name in "abcde") > 30


def test_round_robin_is_blind_to_sessions_and_content():
    cluster = Cluster("abc", policy="round_robin")
    history = tokens(500, 0)
    workers = [cluster.run(history, "s").worker for _ in range(9)]
    assert workers[:3] == workers[3:6] == workers[6:9]
    assert sorted(workers[:3]) == ["a", "b", "c"]


def test_least_load_and_random():
    cluster = Cluster("abc", policy="least_load")
    history = tokens(500, 0)
    cluster.run(history, "s")
    cluster.busy("a", queued=10)
    cluster.busy("b", queued=5, requests=1)
    assert cluster.route(history, "s").receipt.worker == "c"
    seen = [Cluster("abc", policy="random", seed=seed).route(history, "s").receipt.worker for seed in range(30)]
    assert set(seen) == set("abc")
    again = [Cluster("abc", policy="random", seed=seed).route(history, "s").receipt.worker for seed in range(30)]
    assert seen == again


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
    recent = RecentWork(60)
    recent.add("a", 100, 0)
    assert recent.get("a", 60) == pytest.approx(50)
    recent.add("a", 10, 120)
    assert recent.get("a", 120) == pytest.approx(35)
    # A clock that goes back makes nothing grow.
    assert recent.get("a", 0) == pytest.approx(35)
    recent.forget("a")
    assert recent.get("a", 120) == 0


def test_a_forgotten_worker_is_not_remembered_by_late_news():
    cluster = Cluster("ab")
    route = cluster.route(tokens(100, 0), "s")
    name = route.receipt.worker
    cluster.router.forget(name)
    route.computed(0)
    cluster.router.generated(name, 50)
    assert cluster.router._recent.get(name, 0.0) == 0


@pytest.mark.parametrize("wrong", [{"policy": "x"}, {"spread": -1}, {"hysteresis": float("nan")}, {"max_homes": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="router"):
        RouterConfig(**wrong)


loads = st.builds(
    WorkerLoad,
    name=st.just("x"),
    queued_tokens=st.integers(0, 200_000),
    requests=st.integers(0, 100),
    max_concurrency=st.integers(1, 64),
)


@st.composite
def situations(draw):
    prompt = draw(st.integers(1, 100_000))
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=8, unique=True))
    candidates = [
        Candidate(
            replace(draw(loads), name=name),
            matched_tokens=draw(st.integers(0, prompt)),
            recent_work=draw(st.floats(0, 1e6)),
            idle_rank=draw(st.integers(0, 5)),
        )
        for name in names
    ]
    home = draw(st.sampled_from([None, *"abcdefgh"]))
    return prompt, candidates, home


@settings(max_examples=300, deadline=None)
@given(situations())
def test_no_worker_is_chosen_that_another_beats_in_everything(situation):
    prompt, candidates, home = situation
    config = RouterConfig()
    chosen = cheapest(candidates, prompt, home, config)
    for other in candidates:
        better = (
            other.matched_tokens > chosen.matched_tokens
            and other.load.queued_tokens <= chosen.load.queued_tokens
            and other.load.requests <= chosen.load.requests
            and other.load.max_concurrency >= chosen.load.max_concurrency
            and other.recent_work <= chosen.recent_work
            and chosen.name != home
        )
        assert not better


@settings(max_examples=300, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_the_choice_depends_on_nothing_but_the_situation(situation, rng):
    prompt, candidates, home = situation
    for name in POLICIES:
        if name == "random":
            continue
        policy = make_policy(RouterConfig(policy=name))
        request = RouteRequest(prompt, ("t", "s"), home)
        first = policy.choose(request, candidates)
        shuffled = list(candidates)
        rng.shuffle(shuffled)
        assert policy.choose(request, shuffled) == first


@settings(max_examples=200, deadline=None)
@given(situations())
def test_more_load_never_attracts_and_a_longer_match_never_repels(situation):
    prompt, candidates, home = situation
    config = RouterConfig()
    for candidate in candidates:
        base = cost(candidate, prompt, home, config)
        heavier = replace(candidate, load=replace(candidate.load, queued_tokens=candidate.load.queued_tokens + 100))
        assert cost(heavier, prompt, home, config) > base
        longer = replace(candidate, matched_tokens=min(candidate.matched_tokens + 100, prompt))
        assert cost(longer, prompt, home, config) <= base


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
