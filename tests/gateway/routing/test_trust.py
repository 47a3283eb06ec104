import logging

from router_cluster import BLOCK, Cluster, tokens

from gateway.router.trust import Level, Trust


def test_a_worker_loses_trust_step_by_step_and_earns_it_back(caplog):
    trust = Trust("w")
    levels = []
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            trust.compare(1000, 0, 32)
            levels.append(trust.level)
        assert levels[:7] == [Level.EXACT] * 7
        assert sorted(levels) == levels
        assert set(levels) == set(Level)
        assert trust.believed(1000) == 0
        back = []
        for _ in range(40):
            trust.compare(1000, 990, 32)
            back.append(trust.level)
    assert sorted(back, reverse=True) == back
    assert set(back) == set(Level)
    assert trust.believed(1000) == 1000
    assert trust.changes == len(caplog.records) == 4
    assert "worker w: its cache index is now taken as 'approximate' and no longer as 'exact'" in caplog.text


def test_now_and_then_is_no_contradiction():
    trust = Trust("w")
    for number in range(200):
        trust.compare(1000, 0 if number % 8 == 0 else 1000, 32)
    assert trust.level is Level.EXACT
    # Nothing promised, nothing to break; nor is a block or two, or a percent.
    broken = trust.broken
    trust.compare(20, 0, 32)
    assert trust.broken == broken
    trust.compare(100_000, 98_500, 32)
    assert trust.broken < broken


def test_half_kept_promises_count_half():
    trust = Trust("w")
    for _ in range(100):
        trust.compare(1000, 500, 32)
    assert trust.level is Level.APPROXIMATE
    assert 450 < trust.believed(1000) < 550


def test_a_worker_that_lies_is_routed_by_load_and_one_that_reforms_by_its_index():
    cluster = Cluster("ab", spread=0, hysteresis=0)
    standing_of = cluster.router.standings
    prompts = [tokens(800, seed) for seed in range(40)]
    for prompt in prompts:
        cluster.store("a", prompt)
    for prompt in prompts:
        route = cluster.route(prompt)
        route.computed(0 if route.receipt.worker == "a" else route.receipt.matched_tokens)
        route.finished()
    assert standing_of()["a"].trust.level is not Level.EXACT
    cluster.router.standings()["a"].trust.level = Level.LOAD
    cluster.busy("a", queued=200)
    fresh = tokens(800, 1000)
    cluster.store("a", fresh)
    route = cluster.route(fresh)
    assert (route.receipt.worker, route.receipt.matched_tokens) == ("b", 0)
    route.abandoned()
    cluster.busy("b", queued=1000)
    for seed in range(60):
        prompt = tokens(800, 2000 + seed)
        cluster.store("a", prompt)
        route = cluster.route(prompt)
        assert route.receipt.worker == "a"
        route.computed(800)
        route.finished()
    assert standing_of()["a"].trust.level is Level.EXACT
    assert cluster.route(prompts[0]).receipt.matched_tokens == 800


def test_what_was_only_expected_or_has_gone_meanwhile_is_no_contradiction():
    cluster = Cluster("a")
    for seed in range(30):
        prompt = tokens(800, seed)
        first, second = cluster.route(prompt), cluster.route(prompt)
        assert second.receipt.matched_tokens == 800
        first.failed()
        second.computed(0)
        second.finished()
    for seed in range(30):
        prompt = tokens(800, 100 + seed)
        cluster.store("a", prompt)
        route = cluster.route(prompt)
        cluster.index.remove_worker("a")
        cluster.sequence["a"] = 0
        cluster.store("a", [])
        route.computed(0)
        route.finished()
    assert cluster.router.standings()["a"].trust.broken == 0


def test_another_life_of_a_worker_is_believed_again():
    cluster = Cluster("a")
    for life in ("1", "2"):
        cluster.loads["a"].instance = life
        route = cluster.route(tokens(10 * BLOCK, 0))
        trust = cluster.router.standings()["a"].trust
        assert (trust.level, trust.broken) == (Level.EXACT, 0.0)
        for _ in range(30):
            trust.compare(1000, 0, 32)
        route.abandoned()
