import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.config import POLICIES, RouterConfig
from prefix_cache.hashing import JoinedDigests, join_digests
from traces.fleet.bound import best_possible, one_lru
from traces.fleet.replica import Job, SimulatedReplica, StepCosts
from traces.fleet.simulation import FleetConfig, FleetSimulation
from traces.format import TraceFormatError
from traces.importers.blocks import BlockRequest, BlockSession, BlockTrace, digests_of
from traces.importers.kv_cache_tester import read_kv_cache_tester
from traces.importers.mooncake import read_mooncake

SIZE = 64


def agents(sessions, turns, system=20, grows=4, seed=0):
    """Sessions with one system prompt, each turn a little longer than the one before."""
    rng = random.Random(seed)
    made = []
    for number in range(sessions):
        ids = list(range(system))
        requests = []
        for turn in range(turns):
            ids += [1000 * (number + 1) + turn * 10 + n for n in range(grows)]
            requests.append(BlockRequest(rng.uniform(0, 4), len(ids) * SIZE + 10, 30, digests_of("", ids)))
        made.append(BlockSession(f"s{number}", 0.0, tuple(requests)))
    return BlockTrace("agents", SIZE, tuple(made))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_the_books_balance(policy):
    trace = agents(12, 6)
    simulation = FleetSimulation(trace, FleetConfig(3, 150, window=5.0), RouterConfig(policy=policy, seed=1))
    run = simulation.run()
    assert len(run.turns) == trace.requests == 72
    assert all(turn.time_to_first_token > 0 for turn in run.turns)
    for replica in simulation._replicas.values():
        replica.pool.check_integrity({})
        assert replica.requests == 0
    for standing in run.router.standings().values():
        assert (standing.pending_seconds, standing.pending_tokens, standing.occupancy.tokens) == (0.0, 0, 0)
    found = sum(turn.cached_tokens for turn in run.turns) // SIZE
    assert found <= best_possible([turn.request.digests for turn in run.turns], 450)


def test_the_same_run_twice_is_the_same():
    runs = [FleetSimulation(agents(8, 5), FleetConfig(2, 200, window=3.0), RouterConfig()).run() for _ in range(2)]
    first, second = ([(t.worker, t.arrived, t.time_to_first_token, t.cached_tokens) for t in run.turns] for run in runs)
    assert first == second


def test_with_room_for_all_sessions_stay_and_nearly_all_is_found():
    trace = agents(24, 8)
    run = FleetSimulation(trace, FleetConfig(4, 1000, window=20.0), RouterConfig()).run()
    found = sum(turn.cached_tokens for turn in run.turns) / SIZE
    bound = best_possible([turn.request.digests for turn in run.turns], 4000)
    assert found / bound >= 0.95
    blind = FleetSimulation(trace, FleetConfig(4, 1000, window=20.0), RouterConfig(policy="least_load")).run()
    assert run.cached_share > blind.cached_share + 0.05
    assert run.time_to_first_token(0.9) < blind.time_to_first_token(0.9)
    # The estimates were learned: on the whole they are off by little.
    off = sum(abs(turn.estimated - turn.time_to_first_token) for turn in run.turns[40:])
    assert off < 0.3 * sum(turn.time_to_first_token for turn in run.turns[40:])


def test_steps_last_what_the_costs_say_and_a_job_interrupts_a_long_stretch():
    costs = StepCosts(step=1.0, prefill_token=0.1, prefill_pair=0.0, decode_sequence=0.5, decode_context_token=0.0)
    replica = SimulatedReplica("r", 100, 4, costs, budget=10)
    first = Job(digests_of("", range(4)), 16, 5, 0.0)
    replica.add(first, 0.0)
    assert replica.begin_step(0.0)
    assert replica.step_ends == 2.0  # 10 of 16 tokens
    assert replica.end_step(2.0).started == [first]
    assert replica.begin_step(2.0)
    assert replica.step_ends == pytest.approx(3.6)
    assert replica.end_step(3.6).first_tokens == [first]
    assert replica.begin_step(3.6)
    assert replica.step_ends == pytest.approx(3.6 + 4 * 1.5)  # four tokens more, taken together
    second = Job(digests_of("", range(4)), 16, 1, 4.0)
    assert replica.add(second, 4.0)
    assert replica.step_ends == pytest.approx(5.1)
    assert replica.end_step(5.1).generated == 1
    assert replica.begin_step(5.1)
    assert second.cached_tokens == 12  # the last block holds the last token, which is always computed
    assert replica.step_ends == pytest.approx(5.1 + 1.0 + 0.4 + 0.5)
    assert replica.end_step(replica.step_ends).finished == [second]
    with pytest.raises(ValueError, match="does not fit"):
        replica.add(Job(digests_of("", []), 1000, 1, 0.0), 9.0)


def all_ways(prompts, blocks):
    """The most that any cache with bypass finds, by trying everything it can keep after each block."""
    best = {frozenset(): 0}
    for digest in itertools.chain(*prompts):
        after = {}
        for held, found in best.items():
            hits = found + (digest in held)
            for kept in _kept(held | {digest}, blocks):
                after[kept] = max(after.get(kept, -1), hits)
        best = after
    return max(best.values())


def _kept(held, blocks):
    for count in range(min(blocks, len(held)) + 1):
        yield from map(frozenset, itertools.combinations(sorted(held), count))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=5), st.integers(1, 3))
def test_the_bound_is_what_the_best_of_all_caches_finds(prompts, blocks):
    digests = [[bytes([number]) * 16 for number in prompt] for prompt in prompts]
    assert best_possible(digests, blocks) == all_ways(digests, blocks)
    assert one_lru(digests, blocks) <= best_possible(digests, blocks)


def test_kv_cache_tester_sessions_and_sub_agents(tmp_path):
    first = {"t": 5.0, "in": 200, "out": 7, "hash_ids": [1, 2, 3], "api_time": 2.0}
    second = {"t": 10.0, "in": 270, "out": 0, "hash_ids": [1, 2, 3, 4], "think_time": 1.5}
    third = {"t": 30.0, "in": 64, "out": 2, "hash_ids": [9]}
    nested = {"t": 8.0, "type": "subagent", "agent_id": "agent_001", "requests": [dict(third, t=0.0)]}
    content = {"id": "x", "block_size": 64, "requests": [first, nested, second, third]}
    (tmp_path / "trace_1.json").write_text(json.dumps(content))
    trace = read_kv_cache_tester(tmp_path, copies=2)
    assert [(s.name, s.start, s.parent, len(s.requests)) for s in trace.sessions] == [
        ("x-0", 5.0, None, 3),
        ("x-0/agent_001", 8.0, "x-0", 1),
        ("x-1", 5.0, None, 3),
        ("x-1/agent_001", 8.0, "x-1", 1),
    ]
    own = trace.sessions[0].requests
    assert [(r.after, r.prompt_tokens, r.output_tokens, len(r.digests)) for r in own] == [
        (0.0, 200, 7, 3),
        (1.5, 270, 1, 4),
        (20.0, 64, 2, 1),
    ]
    assert own[1].digests[:3] == own[0].digests
    assert trace.working_set() == 10
    (tmp_path / "trace_2.json").write_text('{"id": "y"}')
    with pytest.raises(TraceFormatError, match=r"trace_2.json.*`requests`"):
        read_kv_cache_tester(tmp_path)
    with pytest.raises(TraceFormatError, match=r"no \.json file"):
        read_kv_cache_tester(tmp_path / "nowhere")


def test_mooncake_conversations_are_found_by_their_prefix(tmp_path):
    rows = [
        (0, 1100, [0, 1, 2]),  # two full blocks
        (1000, 600, [0, 9]),  # the system prompt alone is nobody's
        (5000, 1600, [0, 1, 3, 4]),  # goes on after block 1
        (9000, 2100, [0, 1, 3, 5, 6]),
    ]
    lines = [{"timestamp": t, "input_length": n, "output_length": 3, "hash_ids": ids} for t, n, ids in rows]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_mooncake(file)
    assert [(s.start, [(r.after, len(r.digests)) for r in s.requests]) for s in trace.sessions] == [
        (0.0, [(0.0, 2), (5.0, 3), (4.0, 4)]),
        (1.0, [(0.0, 1)]),
    ]
    assert trace.open_loop
    assert isinstance(trace.sessions[0].requests[0].digests, JoinedDigests)
    file.write_text('{"timestamp": 1}\n')
    with pytest.raises(TraceFormatError, match=r"trace.jsonl:1: a line has"):
        read_mooncake(file)
    assert join_digests(digests_of("a", [1])) != join_digests(digests_of("b", [1]))
