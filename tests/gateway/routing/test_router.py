"""Where sessions go, and where they stay."""

from dataclasses import replace

from router_cluster import BLOCK, Cluster, tokens

from gateway.router.costs import Candidate
from gateway.router.memory import Homes
from gateway.router.policies import RouteRequest, SessionPolicy


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
        route = cluster.route(tokens(800, seed), f"s{seed}")
        assert route.receipt.worker == "a"
        route.abandoned()


def test_imbalance_does_not_discard_affinity_late_in_a_conversation():
    cluster = Cluster("ab")
    history = tokens(60_000, 1)
    home = cluster.run(history, "long").worker
    cluster.busy(home, queued=100_000, requests=40)
    receipt = cluster.run(history + tokens(500, 2), "long")
    assert (receipt.worker, receipt.reason) == (home, "prefix")
    # It leaves when waiting costs more than computing everything elsewhere, and not before.
    cluster.busy(home, queued=450_000, requests=40)
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
    route = cluster.route(prompt, "s")
    home = route.receipt.worker
    route.abandoned()
    # A quarter of the prompt's prefill is what it stays for: 0.0102 s or so, or 254 tokens in the queue.
    cluster.busy(home, queued=245)
    route = cluster.route(prompt, "s")
    assert (route.receipt.worker, route.receipt.reason) == (home, "home")
    route.abandoned()
    cluster.busy(home, queued=350)
    assert cluster.route(prompt, "s").receipt.worker != home


def test_a_turn_does_not_leave_its_worker_for_those_that_wait_there_for_it():
    cluster = Cluster("ab", opportunity=0)
    prompt = tokens(400, 1)
    home = cluster.run(prompt, "s").worker
    cluster.busy(home, queued=5000, requests=6)
    assert cluster.route(prompt, "s").receipt.worker != home
    cluster = Cluster("ab", opportunity=0)
    assert cluster.run(prompt, "s").worker == home
    cluster.busy(home, queued=5000, requests=6)
    cluster.loads[home] = replace(cluster.loads[home], held_tokens=5000)
    assert cluster.route(prompt, "s").receipt.worker == home
    assert cluster.route(tokens(400, 2), "new").receipt.worker != home


def test_sessions_are_matched_exactly():
    policy = SessionPolicy()
    candidates = [Candidate(name) for name in "abcdefgh"]

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
    policy = SessionPolicy()
    every = [Candidate(name) for name in "abcde"]
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


def test_the_longest_prefix_policy_waits_for_nobody():
    cluster = Cluster("abc", policy="longest_prefix")
    history = tokens(500, 0)
    cluster.store("b", history[:320])
    cluster.busy("b", queued=1_000_000, requests=60)
    route = cluster.route(history, "s")
    assert (route.receipt.worker, route.receipt.reason) == ("b", "prefix")
    cluster.busy("a", queued=10)
    assert cluster.route(tokens(500, 1), "t").receipt.reason == "least_load"
