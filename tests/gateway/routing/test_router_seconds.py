"""What a worker would cost in seconds: what waits there, hits by tier, evictions, and what is learned of its pace."""

from dataclasses import replace

import pytest
from router_cluster import BLOCK, ROOT, Cluster, tokens

from gateway.router.costs import WorkerLoad
from gateway.turn import SessionRef
from prefix_cache.events import Snapshot
from prefix_cache.hashing import block_digests, join_digests


def test_beyond_max_concurrency_a_turn_waits_for_others_to_end():
    cluster = Cluster("a")
    cluster.run(tokens(100, 0))
    standing = cluster.router.standings()["a"]
    standing.service = 8.0
    free, full = (WorkerLoad("a", requests=requests, max_concurrency=4) for requests in (3, 4))
    assert standing.queue(free, 100, 0.0) == 0.0
    assert standing.queue(full, 100, 0.0) == 2.0
    assert standing.queue(replace(full, requests=5), 100, 0.0) == 4.0


def test_a_turn_waits_for_kv_memory_and_shared_beginnings_count_once():
    cluster = Cluster("a", opportunity=0)
    cluster.loads["a"] = WorkerLoad("a", max_concurrency=64, kv_tokens=10_000)
    context = tokens(6400, 0)
    cluster.run(context)
    routes = [cluster.route(context + tokens(160, 1 + child)) for child in range(10)]
    standing = cluster.router.standings()["a"]
    assert standing.occupancy.tokens == 6400 + 10 * 160
    for route in routes:
        route.computed(6400)
    assert standing.queue(cluster.loads["a"], 1000, 0.0) == 0.0
    assert standing.queue(cluster.loads["a"], 6000, 0.0) == standing.service * 4000 / 8000
    for route in routes:
        route.finished(0.1, 0.2)
    assert standing.occupancy.tokens == 0
    assert standing.queue(cluster.loads["a"], 20_000, 0.0) == 0.0


def test_the_queue_is_what_was_sent_less_what_is_done_and_gives_way_to_the_truth():
    cluster = Cluster("a")
    first, second = cluster.route(tokens(10_000, 1)), cluster.route(tokens(5_000, 2))
    standing = cluster.router.standings()["a"]
    assert standing.queue(cluster.loads["a"], 100, cluster.now) == pytest.approx(first.seconds + second.seconds)
    cluster.now = 0.2
    assert standing.queue(cluster.loads["a"], 100, cluster.now) == pytest.approx(first.seconds + second.seconds - 0.2)
    # Only the first is under way: time cannot take from the second.
    cluster.now = 60.0
    assert standing.queue(cluster.loads["a"], 100, cluster.now) == pytest.approx(second.seconds)
    first.computed(0)
    before = second.seconds
    second.started(4_800)
    assert second.seconds < before / 5
    assert standing.queue(cluster.loads["a"], 100, cluster.now) == pytest.approx(second.seconds)
    second.failed()
    assert standing.queue(cluster.loads["a"], 100, cluster.now) == 0.0
    # What others have put there counts by the token.
    assert standing.queue(replace(cluster.loads["a"], queued_tokens=1000), 100, 60.0) == pytest.approx(0.04)


def test_a_slow_worker_gets_less_once_it_has_said_so():
    cluster = Cluster("ab", spread=0)
    counts = dict.fromkeys("ab", 0)
    for seed in range(60):
        routes = [cluster.route(tokens(2000, seed * 10 + n), f"s{seed}-{n}") for n in range(4)]
        for route in routes:
            name = route.receipt.worker
            counts[name] += 1
            together = len(route.standing.pending)
            route.computed(0)
            route.finished(prefill_seconds=together * (1.2 if name == "a" else 0.2))
    slow, fast = (
        cluster.router.standings()[name].coefficients.work(2000, 0)
        + cluster.router.standings()[name].coefficients.overhead(0, 2000)
        for name in "ab"
    )
    assert fast == pytest.approx(0.2, rel=0.25)
    # It says little, as it gets little; as far as it does not, it counts as its peers do.
    assert 0.4 < slow < 1.3
    assert counts["b"] > 3 * counts["a"]


def test_hits_are_priced_by_their_tier():
    cluster = Cluster("abc", spread=0, opportunity=0)
    prompt = tokens(16_000, 0)
    joined = join_digests(block_digests(prompt, ROOT, BLOCK))
    for name, tier in zip("abc", ("disk", "host", "remote"), strict=True):
        cluster.index.apply(name, Snapshot("i", 0, {tier: joined}))
    computing = cluster.router.route(
        digests=[], prompt_tokens=16_000, block_size=BLOCK, session=SessionRef("t", None), loads=list(cluster.loads.values())
    )
    computing.abandoned()
    route = cluster.route(prompt, "s")
    assert (route.receipt.worker, route.receipt.matched_tokens) == ("b", 16_000)
    terms = {name: seconds for name, _, seconds in route.decision.candidates()}
    assert terms["b"]["transfer"] == pytest.approx(16_000 * 5e-6)
    assert terms["b"]["transfer"] < terms["a"]["transfer"] < terms["c"]["transfer"]
    # Loading never costs more than computing would.
    assert terms["c"]["transfer"] <= next(computing.decision.candidates())[2]["prefill"]


def test_evicting_what_will_be_asked_for_costs_where_it_would_happen():
    cluster = Cluster("ab", spread=0)
    for name in "ab":
        cluster.loads[name] = WorkerLoad(name, max_concurrency=64, kv_tokens=3200)
        cluster.store(name, tokens(3200, ord(name)))
    for seed in range(30):
        cluster.run(tokens(100, seed), f"s{seed}")
    for seed in range(30):
        cluster.now += 20
        cluster.run(tokens(120, seed), f"s{seed}")
    cluster.router.standings()["a"].worked(1.0, 3000, cluster.now)
    cluster.router.standings()["b"].worked(1.0, 30, cluster.now)
    rows = {name: terms for name, _, terms in cluster.route(tokens(500, 999), "new").decision.candidates()}
    # What lies on a is evicted within the gaps after which sessions come back; on b it would lie there long after.
    assert rows["a"]["eviction"] > 4 * rows["b"]["eviction"] >= 0


def test_the_way_to_a_worker_is_part_of_its_estimate():
    cluster = Cluster("ab", spread=0)
    for seed in range(60):
        for name in "ab":
            route = cluster.route(tokens(500, seed), exclude=set("ab") - {name})
            route.started(0, queue_seconds=0.1)
            cluster.now += 0.15 + (0.4 if name == "a" else 0.0)
            route.computed(0)
            route.finished(prefill_seconds=0.05)
    standings = cluster.router.standings()
    assert standings["a"].latency == pytest.approx(0.4, rel=0.25)
    assert standings["b"].latency == pytest.approx(0.0, abs=1e-3)
    assert {cluster.route(tokens(500, 1000 + n)).receipt.worker for n in range(3)} == {"b"}


def test_prompts_that_are_computed_together_teach_what_a_token_costs():
    cluster = Cluster("a")
    for seed in range(40):
        together = [cluster.route(tokens(500, 100 * seed + n)) for n in range(1 + seed % 8)]
        for route in together:
            route.started(0, queue_seconds=0.0)
        cluster.now += 0.1 + 0.001 * 500 * len(together)
        for route in together:
            route.computed(0)
        for route in together:
            route.finished(prefill_seconds=0.1 + 0.001 * 500 * len(together))
    k = cluster.router.standings()["a"].coefficients
    assert k.token == pytest.approx(0.001, rel=0.25)
    assert k.fixed < 0.25


def test_the_first_report_of_one_worker_counts_for_all():
    cluster = Cluster("abc", spread=0)
    routes = {name: cluster.route(tokens(500, ord(name)), name, exclude=set("abc") - {name}) for name in "abc"}
    routes["a"].started(0, queue_seconds=0.0)
    routes["a"].computed(0)
    routes["a"].finished(prefill_seconds=3.0)
    estimates = {name: standing.coefficients.work(500, 0) for name, standing in cluster.router.standings().items()}
    assert estimates["b"] == estimates["c"] == pytest.approx(estimates["a"], rel=0.1)
    assert estimates["a"] > 0.5
    # So a session that is about to go on has no reason to leave for a worker that has not spoken.
    cluster.store("a", tokens(500, ord("a")))
    assert cluster.route(tokens(500, ord("a")) + tokens(50, 1), "a").receipt.worker == "a"
