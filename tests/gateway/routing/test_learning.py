"""What the router does less often than a turn comes, and that nobody sees it."""

import pytest

from gateway.router.config import RouterConfig
from gateway.router.costs import Candidate, WorkerLoad
from gateway.router.receipts import TERMS, Decision
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import Snapshot
from prefix_cache.index import ResidencyIndex


class Fleet:
    def __init__(self, workers=1):
        self.now = 0.0
        self.index = ResidencyIndex()
        self.router = Router(RouterConfig(), self.index, lambda: self.now)
        self.names = [f"w{number}" for number in range(workers)]
        for name in self.names:
            self.index.apply(name, Snapshot("i", 0, {}))

    def turn(self, prefill, every):
        route = self.router.route(
            digests=[],
            prompt_tokens=1000,
            block_size=16,
            session=SessionRef("t", None),
            loads=[WorkerLoad(name, max_concurrency=8) for name in self.names],
        )
        route.started(0, 0.0)
        route.computed(0)
        route.finished(prefill, 0.1)
        self.now += every
        return route


def test_a_hundred_reports_a_second_cost_what_ten_do_and_change_is_still_followed():
    fleet = Fleet()
    for _ in range(1000):
        fleet.turn(0.1, every=0.01)
    standing = fleet.router.standings()["w0"]
    assert 64 + 90 <= standing.estimator.observations <= 64 + 110
    assert standing.coefficients.work(1000, 0) + standing.coefficients.overhead(0, 1000) == pytest.approx(0.1, rel=0.05)
    for _ in range(4000):
        fleet.turn(0.4, every=0.01)
    assert standing.coefficients.work(1000, 0) + standing.coefficients.overhead(0, 1000) == pytest.approx(0.4, rel=0.1)


def test_ten_reports_a_second_are_all_learned_from():
    fleet = Fleet()
    for _ in range(200):
        fleet.turn(0.1, every=0.11)
    assert fleet.router.standings()["w0"].estimator.observations == 200


@pytest.mark.parametrize("workers", ["abc", "abcdefghijklmnopqrst"])
def test_a_receipt_shows_the_same_before_and_after_it_is_packed(workers):
    candidates = [
        Candidate(name, 32 * number, *(number + 0.125 * k for k in range(8)), 7, 3) for number, name in enumerate(workers)
    ]
    decision = Decision(
        request_id="r",
        tenant="t",
        session=None,
        prompt_tokens=100,
        policy="prefix",
        chosen=candidates[1],
        reason="load",
        home=None,
        candidates=candidates,
        shadow=None,
    )
    shown = list(decision.candidates())
    assert decision.best_other() == candidates[0].seconds
    assert shown[2] == ("c", 64, {term: getattr(candidates[2], term) for term in TERMS})
    decision.seal()
    decision.seal()
    assert list(decision.candidates()) == shown
    assert decision.num_candidates == len(workers)
