"""What a busy machine does to the times of first tokens is no property of a worker."""

import itertools
import math
import random

import pytest

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.deviation import Crowd, Deviation
from gateway.router.router import Router
from gateway.router.way import Way
from gateway.turn import SessionRef
from prefix_cache.events import BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import block_digests, join_digests
from prefix_cache.index import ResidencyIndex

ROOT, BLOCK = bytes(16), 16


class Noisy:
    """Workers that are all alike: `token` seconds a token, times noise, behind a way that takes `way` seconds, times noise."""

    def __init__(self, names, seed, token, way, factors=None):
        self.random = random.Random(seed)
        self.now = 0.0
        self.index = ResidencyIndex(100_000, 100_000)
        self.router = Router(RouterConfig(), self.index, lambda: self.now)
        self.loads = [WorkerLoad(name, max_concurrency=64, instance=name) for name in names]
        self.sequence = dict.fromkeys(names, 0)
        self.token, self.way, self.factors = token, way, factors or {}
        self.burst = 1.0
        for name in names:
            self.index.apply(name, Snapshot("i", 0, {}))

    def noise(self):
        """Heavy-tailed, and in bursts: a neighbour of the machine comes and goes."""
        if self.random.random() < 0.1:
            self.burst = math.exp(self.random.gauss(0.5, 0.7))
        return self.burst * math.exp(self.random.gauss(0.0, 0.8))

    def turn(self, history, session):
        digests = block_digests(history, ROOT, BLOCK)
        route = self.router.route(
            digests=digests, prompt_tokens=len(history), block_size=BLOCK, session=SessionRef("t", session), loads=self.loads
        )
        name = route.receipt.worker
        cached = min(route.receipt.matched_tokens, len(history) - 1)
        route.started(cached, queue_seconds=0.0)
        seconds = (0.001 + (len(history) - cached) * self.token) * self.noise() * self.factors.get(name, 1.0)
        self.now += seconds + self.way * self.noise()
        route.computed(cached)
        route.finished(prefill_seconds=seconds, decode_seconds=0.01)
        self.sequence[name] += 1
        stored = BlocksStored(join_digests(digests), ROOT)
        self.index.apply(name, EventBatch("i", self.sequence[name], (stored,)))
        self.now += 0.5
        return name


def moves(cluster, sessions, turns):
    """How often a turn went elsewhere than the one before, sessions taking turns."""
    histories = [[cluster.random.randrange(50_000) for _ in range(400)] for _ in range(sessions)]
    visits = [[] for _ in range(sessions)]
    for _ in range(turns):
        for number, history in enumerate(histories):
            visits[number].append(cluster.turn(history, f"s{number}"))
            history.extend(cluster.random.randrange(50_000) for _ in range(60))
    return sum(before != after for each in visits for before, after in itertools.pairwise(each))


# A CPU, a GPU, and replicas without a model, where a prefix is worth nothing that could be measured.
@pytest.mark.parametrize("token", [1e-3, 3e-5, 1e-8])
@pytest.mark.parametrize("sessions", [1, 2, 4])
def test_noise_moves_no_session(token, sessions):
    moved = sum(moves(Noisy("abc", seed, token, 0.005), sessions, 12) for seed in range(12))
    assert moved == 0


def test_a_worker_that_was_never_used_is_no_nearer_than_the_others():
    cluster = Noisy("ab", 1, 1e-8, 0.03)
    home = cluster.turn(list(range(400)), "s")
    assert {cluster.turn(list(range(400 + 20 * turn)), "s") for turn in range(1, 20)} == {home}
    [other] = set("ab") - {home}
    assert cluster.router.standings()[other].latency == pytest.approx(cluster.router.standings()[home].latency)
    assert cluster.router.standings()[other].latency > 0.005


def test_a_worker_that_is_slower_is_found_out_in_spite_of_the_noise():
    cluster = Noisy("abc", 5, 1e-3, 0.005, {"b": 4.0})
    count = dict.fromkeys("abc", 0)
    for number in range(200):
        count[cluster.turn([cluster.random.randrange(50_000) for _ in range(400)], f"s{number}")] += 1
    assert count["b"] < 0.4 * min(count["a"], count["c"])


def test_what_noise_explains_is_no_deviation():
    rng = random.Random(3)
    far = 0
    crowd = Crowd()
    others = Deviation(crowd)
    for _ in range(40):
        others.add(1.0, 1.0)
    for _ in range(300):
        deviation = Deviation(crowd)
        for _ in range(30):
            deviation.add(math.exp(rng.gauss(0, 1.0)), 1.0)
        far += deviation.factor() != 1.0
    assert far <= 6
    deviation = Deviation(crowd)
    for _ in range(30):
        deviation.add(3.0 * math.exp(rng.gauss(0, 0.2)), 1.0)
    assert deviation.factor() == pytest.approx(3.0, rel=0.15)
    assert 1.0 < deviation.factor(0.3) < deviation.factor()
    assert deviation.factor(0.0) == 1.0
    alone = Deviation(Crowd())
    for _ in range(30):
        alone.add(3.0, 1.0)
    assert alone.factor() == 1.0


def test_the_way_follows_the_middle_and_not_the_outliers():
    way = Way()
    rng = random.Random(4)
    for number in range(300):
        way.add(5.0 if number % 20 == 0 else 0.02 * math.exp(rng.gauss(0, 0.2)))
    assert 0.015 < way.seconds < 0.05
    for seconds in (math.nan, math.inf, -1.0):
        way.add(seconds)
    assert 0.01 < way.seconds < 0.05
    assert way.scaled(1.0) == pytest.approx(way.seconds)


def test_many_requests_in_one_busy_moment_are_one_witness():
    """Fifty agents at once: those that were sent to `a` found the machine busy, and come back for their next turn."""
    cluster = Noisy("ab", 1, 1e-8, 0.0)
    histories = {f"s{number}": [1000 * number + n for n in range(640)] for number in range(50)}

    def wave(delays):
        routes = []
        for session, history in histories.items():
            digests = block_digests(history, ROOT, BLOCK)
            ref = SessionRef("t", session)
            routes.append(
                cluster.router.route(
                    digests=digests, prompt_tokens=len(history), block_size=BLOCK, session=ref, loads=cluster.loads
                )
            )
        began = cluster.now
        for route in routes:
            cached = route.receipt.matched_tokens
            route.started(cached, queue_seconds=0.0)
            cluster.now = began + delays[route.receipt.worker]
            route.computed(cached)
            route.finished(prefill_seconds=0.0001, decode_seconds=0.01)
        cluster.now = began + 1.0
        return [route.receipt.worker for route in routes]

    first = wave({"a": 0.06, "b": 0.02})
    assert set(first) == {"a", "b"}
    assert wave({"a": 0.03, "b": 0.03}) == first
    assert wave({"a": 0.02, "b": 0.05}) == first
