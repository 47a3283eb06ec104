from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import RequestRefused
from engine.simulate import SimulatedEngine
from engine.simulation.clock import MonotonicClock, VirtualClock
from engine.simulation.config import CostModel, SimulationConfig
from gateway.workers.protocol import Done, Finished, GenerateRequest, SamplingParams, Started, Tokens
from prefix_cache.events import BlocksRemoved, BlocksStored
from prefix_cache.hashing import block_digests, pack_tokens, split_digests


def engine(**changes):
    config = {"num_blocks": 64, "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64, "mean_output_tokens": 0}
    return SimulatedEngine(SimulationConfig(**{**config, **changes}), clock=VirtualClock())


def request(request_id, token_ids, *, priority=0, salt=None, grammar=None, **sampling):
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(
        request_id=request_id, token_ids=list(token_ids), sampling=sampling, priority=priority, cache_salt=salt, grammar=grammar
    )


def add(core, *args, **kwargs):
    core.add(core.prepare(request(*args, **kwargs)))


def run(core, chunks=None):
    chunks = defaultdict(list) if chunks is None else chunks
    for _ in range(100_000):
        if not core.has_work():
            return chunks
        for request_id, chunk in core.step():
            chunks[request_id].append(chunk)
    raise AssertionError("the engine never became idle")


def tokens_of(chunks, index=0):
    return [token for chunk in chunks if isinstance(chunk, Tokens) and chunk.index == index for token in chunk.token_ids]


def test_a_stream_is_started_tokens_finished_done():
    core = engine()
    add(core, "a", range(40), max_tokens=5)
    chunks = run(core)["a"]
    assert [type(chunk) for chunk in chunks] == [Started] + [Tokens] * 5 + [Finished, Done]
    assert chunks[0] == Started(40, 0, 0.0)
    assert chunks[-2] == Finished("length")
    assert (chunks[-1].prompt_tokens, chunks[-1].completion_tokens, chunks[-1].cached_tokens) == (40, 5, 0)
    core.check_integrity()


def test_the_second_time_a_prompt_is_cached_up_to_its_last_token():
    core = engine()
    add(core, "a", range(48), max_tokens=4)
    run(core)
    add(core, "b", range(48), max_tokens=4)
    chunks = run(core)["b"]
    assert chunks[0].cached_tokens == 32  # the third block holds the token that gives the first answer
    add(core, "c", range(49), max_tokens=4)
    assert run(core)["c"][0].cached_tokens == 48
    add(core, "salted", range(49), salt="tenant", max_tokens=4)
    assert run(core)["salted"][0].cached_tokens == 0
    stats = core.stats()
    assert stats.prompt_tokens_total == 48 + 48 + 49 + 49
    assert stats.cached_tokens_total == 80
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    core.check_integrity()


def test_without_prefix_caching_nothing_is_found_and_nothing_published():
    core = engine(prefix_caching=False)
    for request_id in "ab":
        add(core, request_id, range(48))
        assert run(core)[request_id][0].cached_tokens == 0
    assert core.take_events() == []
    assert core.snapshot() == {}
    assert core.stats().free_blocks == 64


def test_the_answer_is_part_of_the_prefix_of_the_next_turn():
    core = engine()
    add(core, "a", range(40), max_tokens=30)
    answer = tokens_of(run(core)["a"])
    add(core, "b", [*range(40), *answer, 7, 7, 7], max_tokens=1)
    # 69 of the 70 tokens have KV (the last one was never an input): four full blocks.
    assert run(core)["b"][0].cached_tokens == 64


def test_tokens_are_a_function_of_what_stands_before():
    first, second = engine(), engine(num_blocks=16, max_num_batched_tokens=9)
    add(first, "a", range(40), max_tokens=40)
    add(second, "b", range(40), max_tokens=40)
    answer = tokens_of(run(first)["a"])
    assert tokens_of(run(second)["b"]) == answer
    assert len(set(answer)) > 5
    # Continued elsewhere, in the middle of it.
    add(second, "c", [*range(40), *answer[:17]], max_tokens=23)
    assert tokens_of(run(second)["c"]) == answer[17:]
    # Another seed, other tokens; the same seed, the same ones.
    for request_id, seed in (("s1", 1), ("s2", 2), ("s3", 1)):
        add(first, request_id, range(40), temperature=1.0, seed=seed, max_tokens=40)
    sampled = run(first)
    assert tokens_of(sampled["s1"]) == tokens_of(sampled["s3"]) != tokens_of(sampled["s2"])
    assert first.info.namespace == second.info.namespace
    assert first.info.instance != second.info.instance


def test_choices_share_the_prompt_and_differ():
    core = engine()
    add(core, "a", range(40), n=4, temperature=1.0, max_tokens=20)
    chunks = defaultdict(list)
    while not any(isinstance(chunk, Tokens) for chunk in chunks["a"]):
        for request_id, chunk in core.step():
            chunks[request_id].append(chunk)
    # Three blocks hold the prompt for all four; nothing has been written after it yet.
    assert core.stats().num_blocks - core.stats().free_blocks - core.stats().cached_blocks == 3
    run(core, chunks)
    answers = [tuple(tokens_of(chunks["a"], index)) for index in range(4)]
    assert [len(answer) for answer in answers] == [20] * 4
    assert len(set(answers)) == 4
    assert sorted(chunk.index for chunk in chunks["a"] if isinstance(chunk, Finished)) == [0, 1, 2, 3]
    assert chunks["a"][-1].completion_tokens == 80
    assert sum(isinstance(chunk, Done) for chunk in chunks["a"]) == 1
    core.check_integrity()


def test_choices_beyond_the_number_of_sequences_wait():
    narrow, wide = engine(max_num_seqs=7), engine(max_num_seqs=20)
    for core in (narrow, wide):
        for request_id in "bcd":
            add(core, request_id, range(100, 140), max_tokens=7)
        add(core, "a", range(40), n=6, temperature=1.0, max_tokens=20)
    ours, theirs = run(narrow)["a"], run(wide)["a"]
    for index in range(6):
        assert tokens_of(ours, index) == tokens_of(theirs, index)
    narrow.check_integrity()


def test_preemption_changes_counters_and_nothing_else():
    tight, roomy = engine(num_blocks=12), engine()
    for core in (tight, roomy):
        for number in range(6):
            add(core, f"r{number}", range(number, number + 40), max_tokens=60)
    ours, theirs = run(tight), run(roomy)
    assert tight.stats().preemptions_total > 0
    assert sum(chunks[-1].preemptions for chunks in ours.values()) == tight.stats().preemptions_total
    assert {key: tokens_of(chunks) for key, chunks in ours.items()} == {
        key: tokens_of(chunks) for key, chunks in theirs.items()
    }
    tight.check_integrity()


def test_priority_goes_first_and_fcfs_ignores_it():
    order = {}
    for scheduling in ("fcfs", "priority"):
        core = engine(max_num_seqs=1, scheduling=scheduling)
        for request_id, priority in (("low", 5), ("mid", 1), ("high", -3)):
            add(core, request_id, range(20), priority=priority, max_tokens=2)
        finished = []
        while core.has_work():
            finished += [request_id for request_id, chunk in core.step() if isinstance(chunk, Done)]
        order[scheduling] = finished
    assert order == {"fcfs": ["low", "mid", "high"], "priority": ["high", "mid", "low"]}


def test_stop_ids_and_end_tokens():
    core = engine()
    add(core, "a", range(40), max_tokens=30)
    answer = tokens_of(run(core)["a"])
    stop = answer[10]
    add(core, "b", range(40), max_tokens=30, stop_token_ids=(stop,))
    chunks = run(core)["b"]
    assert tokens_of(chunks) == answer[: answer.index(stop) + 1]
    assert chunks[-2] == Finished("stop", 0, stop)
    ending = engine(mean_output_tokens=4, eos_token_ids=(2,), max_model_len=4096, num_blocks=512)
    for number in range(50):
        add(ending, f"r{number}", range(number, number + 20), max_tokens=400, min_tokens=2 if number % 2 else 0)
    add(ending, "ignoring", range(20), max_tokens=400, ignore_eos=True)
    chunks = run(ending)
    lengths = [len(tokens_of(chunks[f"r{number}"])) for number in range(50)]
    assert 2 < sum(lengths) / 50 < 9
    assert all(tokens_of(chunks[f"r{number}"])[-1] == 2 for number in range(50))
    assert all(length >= 3 for length in lengths[1::2])
    assert len(tokens_of(chunks["ignoring"])) == 400


def test_time_is_what_the_cost_model_says():
    cost = CostModel(step=0.01, prefill_token=0.001, prefill_pair=0.0001, decode_sequence=0.002, decode_context_token=0.00001)
    core = engine(cost=cost, max_num_batched_tokens=30)
    add(core, "a", range(50), max_tokens=3)
    done = run(core)["a"][-1]
    # Chunks of 30 and 20 tokens: pairs are 30 * 29/2 and 20 * (30 + 19/2).
    prefill = 2 * 0.01 + 50 * 0.001 + (30 * 14.5 + 20 * 39.5) * 0.0001
    decode = 2 * 0.01 + 2 * 0.002 + (50 + 51) * 0.00001
    assert done.prefill_seconds == pytest.approx(prefill)
    assert done.decode_seconds == pytest.approx(decode)
    assert core.stats().steps_total == 4
    assert core.stats().decode_tokens_per_second == pytest.approx(2 / decode, rel=0.05)
    scaled = engine(cost=cost, max_num_batched_tokens=30, time_scale=0.5)
    add(scaled, "a", range(50), max_tokens=3)
    assert run(scaled)["a"][-1].prefill_seconds == pytest.approx(prefill / 2)


def test_events_follow_the_blocks():
    core = engine(num_blocks=8)
    add(core, "a", range(40), max_tokens=2)
    run(core)
    (event,) = core.take_events()
    root = bytes.fromhex(core.info.namespace)
    assert event == BlocksStored(b"".join(block_digests(list(range(40)), root)), root)
    assert core.snapshot() == {"device": event.digests}
    add(core, "b", range(100, 200), max_tokens=2)
    run(core)
    events = core.take_events()
    assert any(isinstance(event, BlocksRemoved) for event in events)
    held = set(split_digests(event.digests))
    for event in events:
        changed = set(split_digests(event.digests))
        held = held | changed if isinstance(event, BlocksStored) else held - changed
    assert held == set(split_digests(core.snapshot()["device"]))


def test_an_interrupted_step_goes_on_with_the_same_batch():
    clock = MonotonicClock()
    core = SimulatedEngine(SimulationConfig(cost=CostModel(step=0.05), mean_output_tokens=0), clock=clock)
    core.add(core.prepare(request("a", range(20), max_tokens=1)))
    core.interrupt()
    assert core.step() == []
    assert core.stats().running == 1
    began = clock.now()
    chunks = core.step()
    assert [type(chunk) for _, chunk in chunks] == [Started, Tokens, Finished, Done]
    assert 0.03 < clock.now() - began < 5
    # Aborting all of a batch that is under way ends it.
    core.add(core.prepare(request("b", range(20), max_tokens=1)))
    core.interrupt()
    assert core.step() == []
    assert core.abort("b")
    assert not core.has_work()
    core.add(core.prepare(request("c", range(100, 120), max_tokens=1)))
    assert [request_id for request_id, _ in core.step()] == ["c"] * 4
    core.check_integrity()


@pytest.mark.parametrize(
    ("changes", "code", "field", "words"),
    [
        ({"token_ids": []}, "empty_prompt", "token_ids", "no tokens"),
        ({"token_ids": [5, 60_000]}, "invalid_token", "token_ids[1]", "60000 at position 1"),
        ({"token_ids": [-1]}, "invalid_token", "token_ids", "2**32"),
        ({"token_ids": None, "packed_token_ids": b"abc"}, "invalid_token", "packed_token_ids", "3 bytes"),
        ({"token_ids": None}, "invalid_request", "token_ids", "exactly one"),
        ({"packed_token_ids": pack_tokens([1])}, "invalid_request", "token_ids", "exactly one"),
        ({"token_ids": [1] * 1024}, "context_length_exceeded", "token_ids", "1024"),
        ({"token_ids": [1] * 900}, "kv_capacity_exceeded", "token_ids", "57 KV blocks"),
        ({"sampling": SamplingParams(max_tokens=900)}, "kv_capacity_exceeded", "sampling.max_tokens", "57 KV blocks"),
        ({"sampling": SamplingParams(n=9)}, "invalid_sampling", "sampling.n", "at most 8"),
        ({"sampling": SamplingParams(max_tokens=0)}, "invalid_sampling", "sampling.max_tokens", "max_tokens"),
        ({"sampling": SamplingParams(temperature=-1)}, "invalid_sampling", "sampling.temperature", "-1"),
        ({"sampling": SamplingParams(logprobs=1)}, "unsupported", "sampling.logprobs", "probabilities"),
        ({"sampling": SamplingParams(stop=("x",))}, "unsupported", "sampling.stop", "tokenizer"),
        ({"grammar": "{}"}, "unsupported_grammar", "grammar", "--engine sim-grammars=ignore"),
    ],
)
def test_refusals_name_field_and_remedy(changes, code, field, words):
    core = engine(num_blocks=50)
    with pytest.raises(RequestRefused) as refused:
        core.prepare(GenerateRequest(**{"request_id": "a", "token_ids": [1, 2], **changes}))
    assert (refused.value.code, refused.value.field) == (code, field)
    assert words in refused.value.message


def test_without_max_tokens_it_generates_what_the_context_or_the_pool_holds():
    core = engine(max_model_len=100)
    add(core, "a", range(40), max_tokens=None)
    assert len(tokens_of(run(core)["a"])) == 60
    small = engine(num_blocks=4)
    add(small, "a", range(40), max_tokens=None)
    assert len(tokens_of(run(small)["a"])) == 25  # the last token's own KV is never needed
    small.check_integrity()


def test_one_id_at_a_time():
    core = engine()
    prepared = core.prepare(request("a", range(20)))
    core.add(prepared)
    with pytest.raises(RequestRefused, match="in flight"):
        core.add(prepared)
    assert core.abort("a")
    assert not core.abort("a")
    core.add(prepared)
    run(core)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_batched_tokens": 4}, "max_num_seqs"),
        ({"time_scale": float("nan")}, "time_scale"),
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (99_999,)}, "99999"),
        ({"scheduling": "random"}, "fcfs"),
        ({"mean_output_tokens": -1}, "mean_output_tokens"),
    ],
)
def test_nonsense_settings_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        SimulationConfig(**changes)
    with pytest.raises(ValueError, match="prefill_pair"):
        CostModel(prefill_pair=-1.0)


requests = st.builds(
    lambda family, length, n, tokens, priority, temperature: (family, length, n, tokens, priority, temperature),
    st.integers(0, 2),
    st.integers(1, 70),
    st.sampled_from([1, 1, 1, 3]),
    st.integers(1, 25),
    st.integers(-1, 1),
    st.sampled_from([0.0, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    mix=st.lists(requests, min_size=1, max_size=8),
    pool=st.integers(7, 30),
    budget=st.integers(4, 60),
    scheduling=st.sampled_from(["fcfs", "priority"]),
    actions=st.lists(st.tuples(st.sampled_from(["step", "step", "step", "add", "abort"]), st.integers(0, 7)), max_size=60),
)
def test_any_mix_in_a_few_blocks_ends_right_and_loses_no_block(mix, pool, budget, scheduling, actions):
    core = engine(num_blocks=pool, max_num_seqs=4, max_num_batched_tokens=budget, scheduling=scheduling)
    prompts = {
        f"r{number}": ([family * 1000 + position for position in range(length)], n, tokens, priority, temperature)
        for number, (family, length, n, tokens, priority, temperature) in enumerate(mix)
    }
    waiting = list(prompts)
    chunks, aborted = defaultdict(list), set()

    def start(request_id):
        prompt, n, tokens, priority, temperature = prompts[request_id]
        add(core, request_id, prompt, n=n, max_tokens=tokens, priority=priority, temperature=temperature, seed=3)

    for action, number in actions:
        if action == "add" and waiting:
            start(waiting.pop())
        elif action == "abort":
            if core.abort(f"r{number}"):
                aborted.add(f"r{number}")
        elif core.has_work():
            for request_id, chunk in core.step():
                assert request_id not in aborted
                chunks[request_id].append(chunk)
        core.check_integrity()
    for request_id in waiting:
        start(request_id)
    run(core, chunks)
    core.check_integrity()
    assert core.stats().free_blocks + core.stats().cached_blocks == pool
    assert core.stats().running == core.stats().waiting == 0
    for request_id in prompts.keys() - aborted:
        prompt, n, tokens, _, temperature = prompts[request_id]
        assert isinstance(chunks[request_id][-1], Done)
        alone = engine()
        add(alone, "alone", prompt, n=n, max_tokens=tokens, temperature=temperature, seed=3)
        expected = run(alone)["alone"]
        for index in range(n):
            assert tokens_of(chunks[request_id], index) == tokens_of(expected, index)
