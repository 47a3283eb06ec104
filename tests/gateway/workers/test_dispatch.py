import asyncio
import logging

import pytest
from fake_replica import DROP, HANG, FakeReplica, Wait, answer, refusal, until

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.router.config import RouterConfig
from gateway.router.policies import make_policy
from gateway.turn import Prompt, SessionRef, TurnError
from gateway.workers.protocol import Done, Failed, Finished, SamplingParams, Started, Tokens
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored
from prefix_cache.hashing import block_digests, join_digests, pack_tokens

ROOT = bytes(16)


class Bench:
    """A dispatcher over fake replicas."""

    def __init__(self, tmp_path, **config):
        self.tmp_path = tmp_path
        self.replicas = {}
        settings = {"poll_interval": 0.02, "probe_timeout": 0.5, "unresponsive_after": 0.3} | config
        self.dispatcher = PoolDispatcher(PoolConfig(**settings))

    async def add(self, name, ready=True, **fields):
        replica = self.replicas[name] = FakeReplica(**fields)
        url = await replica.start(self.tmp_path / f"{name}-{len(self.replicas)}-{id(replica)}.sock")
        self.dispatcher.add_worker(name, url)
        if ready:
            await until(lambda: self.state(name) == "ready")
            await until(lambda: self.dispatcher.index.position(name) is not None)
        return replica

    def state(self, name):
        return next((view.state for view in self.dispatcher.workers() if view.name == name), None)

    def view(self, name):
        return next(view for view in self.dispatcher.workers() if view.name == name)

    async def send(self, request_id="r", tokens=range(40), session="s", model="m", known_as=None, **kwargs):
        prompt = Prompt(pack_tokens(tokens), tuple(block_digests(list(tokens), ROOT, 4)))
        return await self.dispatcher.dispatch(
            request_id=request_id,
            model=model,
            session=SessionRef("t", session),
            prompt=prompt,
            sampling=SamplingParams(**kwargs),
            priority=0,
            trace_headers={"traceparent": "tp"},
            known_as=known_as,
        )

    def books_are_empty(self):
        return all(view.in_flight == 0 and view.queued_tokens == 0 for view in self.dispatcher.workers())

    async def close(self):
        await self.dispatcher.__aexit__()
        for replica in self.replicas.values():
            replica.frozen = False
            await replica.stop()


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    await bench.close()


async def everything(generation):
    return [chunk async for chunk in generation.chunks()]


async def test_the_way_of_a_request(bench):
    replica = await bench.add("a")
    replica.scripts.append(answer((7, 8), cached=8, prompt=40))
    generation = await bench.send(seed=3)
    assert generation.receipt.worker == "a"
    assert (generation.receipt.reason, generation.receipt.candidates) == ("only", 1)
    assert bench.view("a").in_flight == 1
    assert bench.view("a").queued_tokens == 40
    assert await generation.started() == Started(40, 8, 0.0)
    assert bench.view("a").queued_tokens == 32
    assert await everything(generation) == answer((7, 8), cached=8, prompt=40)[1:]
    assert bench.books_are_empty()
    await generation.aclose()
    await generation.aclose()
    (request,) = replica.requests
    assert request.packed_token_ids == pack_tokens(range(40))
    assert (request.sampling.seed, request.session) == (3, "s")
    assert replica.headers[0]["traceparent"] == "tp"
    assert replica.aborted == []


async def test_a_session_without_a_name_is_sent_as_the_gateway_calls_it(bench):
    replica = await bench.add("a")
    for number, (session, known_as) in enumerate([(None, "auto-1"), ("s", "s"), (None, None)]):
        generation = await bench.send(f"r{number}", session=session, known_as=known_as)
        await everything(generation)
        await generation.aclose()
    assert [request.session for request in replica.requests] == ["auto-1", "s", None]


async def test_started_may_be_given_up_and_waited_for_again(bench):
    replica = await bench.add("a")
    go = asyncio.Event()
    chunks = answer((7,))
    replica.scripts.append([b"\n", Wait(go), *chunks])
    generation = await bench.send()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await generation.started()
    go.set()
    assert await generation.started() == chunks[0]
    assert await generation.started() == chunks[0]
    assert await everything(generation) == chunks[1:]
    await generation.aclose()
    assert bench.books_are_empty()


@pytest.mark.parametrize(
    "first",
    [
        [DROP],
        [b"\n", DROP],
        [b"garbage\n"],
        [b"\n"],
        [Failed("shutting_down", "Going.")],
        refusal(500),
        refusal(503, "queue_full", "Full."),
        refusal(409, "duplicate_request_id", "Twice."),
        refusal(404),
    ],
)
async def test_what_fails_before_its_first_chunk_goes_elsewhere(bench, first):
    replicas = [await bench.add("a"), await bench.add("b")]
    for replica in replicas:
        replica.default = first

    async def start():
        await (await bench.send()).started()

    with pytest.raises(TurnError) as caught:
        await start()
    assert caught.value.status in (502, 503)
    assert caught.value.retry_after is not None
    assert bench.books_are_empty()
    for replica in replicas:
        replica.default = None
    for _ in range(4):
        replicas[0].scripts = [first]
        generation = await bench.send(session=None)
        assert (await generation.started()).prompt_tokens == 40
        chunks = await everything(generation)
        assert isinstance(chunks[-1], Done)
        await generation.aclose()
        assert bench.books_are_empty()


async def test_a_retried_request_has_another_id_and_the_receipt_follows(bench):
    a, b = await bench.add("a"), await bench.add("b")
    a.default = b.default = [b"\n", DROP]
    first = await bench.send("id")
    name = first.receipt.worker
    other = b if name == "a" else a
    other.default = None
    await first.started()
    assert first.receipt.worker != name
    assert [request.request_id for request in other.requests] == ["id.1"]
    await everything(first)
    await first.aclose()


async def test_a_refusal_is_the_clients_and_opens_nothing(bench):
    replica = await bench.add("a")
    for _ in range(10):
        replica.scripts.append(refusal(400, "invalid_sampling", "top_p must lie in (0, 1].", "sampling.top_p"))
        with pytest.raises(TurnError) as caught:
            await bench.send()
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_sampling", "top_p")
        assert caught.value.message == "top_p must lie in (0, 1]."
    replica.scripts.append(refusal(422, "invalid_grammar", "No.", "/format/0"))
    with pytest.raises(TurnError) as caught:
        await bench.send()
    assert (caught.value.status, caught.value.param) == (400, "/format/0")
    replica.scripts.append(refusal(400, "context_length_exceeded", "Long.", "packed_token_ids"))
    with pytest.raises(TurnError) as caught:
        await bench.send()
    assert caught.value.param is None
    assert len(replica.requests) == 12
    generation = await bench.send()
    await everything(generation)
    await generation.aclose()
    assert bench.books_are_empty()


async def test_an_honest_busy_opens_nothing_and_is_passed_on(bench):
    replica = await bench.add("a")
    for _ in range(10):
        replica.scripts.append(refusal(503, "queue_full", "Full.", headers={"Retry-After": "9"}))
        with pytest.raises(TurnError) as caught:
            await bench.send()
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "overloaded", 9.0)
    generation = await bench.send()
    await everything(generation)
    await generation.aclose()


async def test_a_worker_that_keeps_failing_is_left_alone_then_tried_once(bench):
    # In turns, so that it does not hang on what the machine makes of estimates who is asked.
    bench.dispatcher.router._policy = make_policy("round_robin", RouterConfig())
    a, b = await bench.add("a"), await bench.add("b")
    a.default = refusal(500)
    for number in range(12):
        generation = await bench.send(tokens=range(number * 1000, number * 1000 + 40), session=None)
        await everything(generation)
        await generation.aclose()
    assert len(b.requests) == 12
    assert len(a.requests) == 3
    a.default = None
    breaker = bench.dispatcher.pool._members["a"].breaker
    breaker._open_until -= 100
    for number in range(6):
        generation = await bench.send(tokens=range(number * 100, number * 100 + 40), session=None)
        await everything(generation)
        await generation.aclose()
    assert len(a.requests) > 4
    assert breaker.failures == 0


async def test_lost_in_the_middle(bench):
    replica = await bench.add("a")
    replica.scripts.append([*answer((1, 2))[:2], DROP])
    generation = await bench.send()
    with pytest.raises(TurnError, match="Worker a was lost") as caught:
        await everything(generation)
    assert (caught.value.status, caught.value.code) == (502, "worker_lost")
    assert bench.books_are_empty()
    await generation.aclose()


async def test_failed_chunks_become_errors_without_retry(bench):
    replica = await bench.add("a")
    for script, status in (
        ([Failed("engine_error", "It broke.")], 502),
        ([*answer()[:2], Failed("engine_error", "It broke.")], 502),
        ([*answer()[:2], Failed("shutting_down", "Going.")], 503),
    ):
        replica.scripts = [script]
        before = len(replica.requests)
        generation = await bench.send()
        with pytest.raises(TurnError, match=r"It broke|Going") as caught:
            await everything(generation)
        assert caught.value.status == status
        await generation.aclose()
        assert len(replica.requests) == before + 1
        assert bench.books_are_empty()


async def test_ended_while_it_was_queued(bench):
    replica = await bench.add("a")
    replica.scripts.append([Finished("abort"), Done(0, 0, 0, 0, 0, 0, 0)])
    generation = await bench.send()
    assert await generation.started() == Started(40, 0, 0.0)
    assert await everything(generation) == [Finished("abort"), Done(0, 0, 0, 0, 0, 0, 0)]
    await generation.aclose()
    assert bench.books_are_empty()


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "reading"])
async def test_leaving_early_aborts_at_once(bench, when):
    replica = await bench.add("a")
    replica.scripts.append({"queued": [b"\n", HANG], "prefilling": [Started(40, 0, 0), HANG]}.get(when, [*answer()[:2], HANG]))
    generation = await bench.send("early")
    if when != "queued":
        await generation.started()
    chunks = generation.chunks()
    if when in ("decoding", "reading"):
        await anext(chunks)
    reader = asyncio.ensure_future(anext(chunks)) if when == "reading" else None
    await asyncio.sleep(0.01)
    async with asyncio.timeout(1):
        await generation.aclose()
    assert replica.left == ["early"] or replica.aborted == ["early"]
    await until(lambda: replica.left == ["early"])
    assert replica.aborted == ["early"]
    assert bench.books_are_empty()
    if reader is not None:
        with pytest.raises(TurnError):
            await reader
    assert len(replica.requests) == 1
    assert bench.dispatcher.index.predicted_blocks == (10 if when in ("decoding", "reading") else 0)


async def test_a_dispatch_cancelled_before_it_was_accepted(bench):
    replica = await bench.add("a")
    replica.scripts.append([HANG])
    task = asyncio.create_task(bench.send("gone"))
    await until(lambda: replica.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: replica.left == ["gone"] and replica.aborted == ["gone"])
    assert bench.books_are_empty()
    assert bench.dispatcher.index.predicted_blocks == 0


async def test_a_dead_worker_is_down_at_once_and_back_when_it_is(bench):
    a = await bench.add("a")
    path = bench.view("a").url.removeprefix("unix:")
    await a.stop()
    with pytest.raises(TurnError) as caught:
        await bench.send()
    assert (caught.value.status, caught.value.code) == (503, "no_worker")
    assert bench.state("a") == "down"
    with pytest.raises(TurnError, match="a is down"):
        bench.dispatcher.pool_info("m")
    bench.replicas["a2"] = successor = FakeReplica(instance="life-2")
    await successor.start(path)
    await until(lambda: bench.state("a") == "ready")
    generation = await bench.send()
    await everything(generation)
    await generation.aclose()
    await until(lambda: bench.dispatcher.index.position("a").instance == "life-2")


async def test_a_busy_worker_is_not_condemned_by_its_probes(bench):
    replica = await bench.add("a")
    replica_stats = replica._stats
    steps = [asyncio.Event() for _ in range(5)]
    script = [Started(40, 0, 0.0)]
    for event in steps:
        script += [Wait(event), Tokens((1,))]
    replica.scripts.append([*script, Finished("stop"), Done(40, 5, 0, 0, 0, 0, 0)])
    generation = await bench.send()
    chunks = generation.chunks()
    await generation.started()
    replica.frozen = True
    for event in steps:
        await asyncio.sleep(0.15)
        event.set()
        assert isinstance(await anext(chunks), Tokens)
    assert bench.state("a") == "ready"
    assert replica_stats is not None
    assert [type(chunk) for chunk in [chunk async for chunk in chunks]] == [Finished, Done]
    replica.frozen = False
    await generation.aclose()


async def test_a_frozen_worker_is_down_after_a_while_and_its_streams_end(bench):
    replica = await bench.add("a")
    replica.scripts.append([*answer()[:2], HANG])
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    replica.frozen = True
    with pytest.raises(TurnError, match="lost"):
        async with asyncio.timeout(5):
            await anext(chunks)
    assert bench.state("a") == "down"
    assert bench.books_are_empty()
    await generation.aclose()
    replica.frozen = False
    await until(lambda: bench.state("a") == "ready")


async def test_silent_workers_are_only_used_when_there_are_no_others(bench):
    a, b = await bench.add("a"), await bench.add("b")
    bench.dispatcher.pool._members["a"].missed = 1
    assert [member.name for member in bench.dispatcher.pool.candidates("m", set())] == ["b"]
    assert [member.name for member in bench.dispatcher.pool.candidates("m", {"b"})] == ["a"]
    assert (a.requests, b.requests) == ([], [])


async def test_workers_that_do_not_belong_are_kept_apart(bench, caplog):
    caplog.set_level(logging.WARNING)
    await bench.add("a")
    await bench.add("model", ready=False, model="other")
    await bench.add("space", ready=False, namespace="11" * 16)
    await bench.add("block", ready=False, block_size=8)
    await bench.add("old", ready=False, protocol_version=0)
    for name in ("model", "space", "block", "old"):
        await until(lambda name=name: bench.state(name) == "mismatched")
    assert "serves model 'other'" in bench.view("model").detail
    assert "not interchangeable" in bench.view("space").detail
    assert "block_size is 8" in bench.view("block").detail
    assert "version 0" in bench.view("old").detail
    assert sum("space is mismatched" in message for message in caplog.messages) == 1
    for number in range(8):
        generation = await bench.send(tokens=range(number * 50, number * 50 + 40), session=None)
        assert generation.receipt.worker == "a"
        await everything(generation)
        await generation.aclose()
    assert bench.dispatcher.models() == ("m",)
    # When the only worker they disagree with is gone, one of the others is what the pool is.
    bench.dispatcher.remove_worker("a")
    await until(lambda: any(bench.state(name) == "ready" for name in ("model", "space", "block")))


async def test_pool_info_and_models(bench):
    with pytest.raises(TurnError, match="none is up, they are starting or restarting") as caught:
        bench.dispatcher.pool_info("m")
    assert (caught.value.status, caught.value.retry_after) == (503, 2.0)
    assert bench.dispatcher.models() == ()
    await bench.add("a", max_model_len=1000)
    await bench.add("b", max_model_len=600)
    assert bench.dispatcher.pool_info("m").max_model_len == 600
    with pytest.raises(TurnError, match=r"no model 'x' here\. Models are: 'm'") as caught:
        bench.dispatcher.pool_info("x")
    assert (caught.value.status, caught.value.param) == (404, "model")
    with pytest.raises(TurnError) as caught:
        await bench.send(model="x")
    assert caught.value.status == 404


async def test_given_models_and_aliases(tmp_path):
    bench = Bench(tmp_path, models=("m", "n"), aliases={"gpt": "m"})
    try:
        assert bench.dispatcher.models() == ("m", "n", "gpt")
        await bench.add("a")
        await bench.add("b", model="n", namespace="22" * 16)
        await bench.add("c", ready=False, model="z")
        await until(lambda: bench.state("c") == "mismatched")
        for model, worker in (("gpt", "a"), ("m", "a"), ("n", "b")):
            generation = await bench.send(model=model)
            assert generation.receipt.worker == worker
            await everything(generation)
            await generation.aclose()
    finally:
        await bench.close()


async def test_a_removed_workers_turns_fail_over_or_end(bench):
    a, b = await bench.add("a"), await bench.add("b")
    a.default = b.default = [b"\n", HANG]
    waiting = await bench.send("w")
    name = waiting.receipt.worker
    (b if name == "a" else a).default = None
    bench.dispatcher.remove_worker(name)
    assert (await waiting.started()).prompt_tokens == 40
    assert waiting.receipt.worker != name
    await everything(waiting)
    await waiting.aclose()
    bench.dispatcher.remove_worker("nobody")
    assert [view.name for view in bench.dispatcher.workers()] == ["b" if name == "a" else "a"]
    assert bench.dispatcher.index.position(name) is None


async def test_adding_the_same_address_again_keeps_the_worker(bench):
    replica = await bench.add("a")
    member = bench.dispatcher.pool._members["a"]
    bench.dispatcher.add_worker("a", bench.view("a").url)
    assert bench.dispatcher.pool._members["a"] is member
    assert replica.event_subscribers == 1


async def test_events_reach_the_index_over_gaps_drops_and_restarts(bench):
    replica = await bench.add("a")
    digests = block_digests(list(range(40)), ROOT, 4)
    index = bench.dispatcher.index
    replica.log.append([BlocksStored(join_digests(digests[:6]), ROOT)])
    await until(lambda: index.lookup(digests) == {"a": 6})
    replica.log.append([BlocksRemoved(join_digests(digests[4:6]))])
    await until(lambda: index.lookup(digests) == {"a": 4})
    # The stream breaks; what happened meanwhile is replayed.
    replica.drop_events.set()
    await until(lambda: replica.event_subscribers == 0)
    replica.log.append([BlocksStored(join_digests(digests[4:9]), digests[3])])
    replica.drop_events.clear()
    await until(lambda: index.lookup(digests) == {"a": 9})
    replica.log.append([AllCleared()])
    await until(lambda: index.lookup(digests) == {})
    assert bench.view("a").events_lag < 2
    generation = await bench.send(tokens=range(40))
    assert generation.receipt.matched_tokens == 0
    await generation.aclose()


async def test_superseded_blocks_are_told_to_those_that_hold_them(bench):
    digests = block_digests(list(range(40)), ROOT, 4)
    holder, other = await bench.add("a"), await bench.add("b")
    old = await bench.add("c", can_supersede=False)
    for replica in (holder, old):
        replica.log.append([BlocksStored(join_digests(digests[:6]), ROOT)])
    await until(lambda: bench.dispatcher.residency(digests) == {"a": 6, "c": 6})
    bench.dispatcher.supersede("m", join_digests(digests[2:]))
    await until(lambda: holder.superseded)
    assert holder.superseded == [join_digests(digests[2:6])]
    assert other.superseded == old.superseded == []


async def test_the_longest_prefix_decides_and_siblings_follow_predictions(bench):
    a, b = await bench.add("a"), await bench.add("b")
    digests = block_digests(list(range(40)), ROOT, 4)
    b.log.append([BlocksStored(join_digests(digests[:8]), ROOT)])
    await until(lambda: bench.dispatcher.index.lookup(digests) == {"b": 8})
    a.default = b.default = [Started(40, 32, 0), HANG]
    generations = [await bench.send(f"r{number}", session=f"s{number}") for number in range(2)]
    assert [g.receipt.worker for g in generations] == ["b", "b"]
    assert generations[0].receipt.reason == "prefix"
    assert generations[0].receipt.matched_tokens == 32
    # The first one's whole prompt counts as resident before any event has said so.
    assert generations[1].receipt.matched_tokens == 40
    for generation in generations:
        await generation.aclose()
    assert bench.books_are_empty()


async def test_foreign_load_counts_and_goes_when_its_report_is_old(bench):
    a = await bench.add("a")
    a.running, a.waiting, a.waiting_prompt_tokens = 2, 3, 5000
    member = bench.dispatcher.pool._members["a"]
    await until(lambda: member.load.queued_tokens == 5000)
    assert member.load.requests == 5
    a.frozen = True
    await until(lambda: member.missed)
    assert (member.load.queued_tokens, member.load.requests) == (0, 0)
    a.frozen = False


async def test_many_at_once_leave_the_books_at_zero(tmp_path):
    bench = Bench(tmp_path, router=RouterConfig(policy="random", seed=1))
    try:
        replicas = [await bench.add(name) for name in "abc"]
        scripts = [None, [DROP], [*answer()[:2], DROP], refusal(500), refusal(400), [*answer()[:2], Failed("x", "y")], [b"{\n"]]
        for number, replica in enumerate(replicas):
            replica.scripts = [scripts[(number + step) % len(scripts)] or answer() for step in range(40)]
        outcomes = []

        async def one(number):
            try:
                generation = await bench.send(f"r{number}", tokens=range(number, number + 30), session=f"s{number % 7}")
            except TurnError as error:
                outcomes.append(error.status)
                return
            try:
                if number % 5 == 0:
                    await generation.aclose()
                    outcomes.append(499)
                else:
                    await everything(generation)
                    outcomes.append(200)
            except TurnError as error:
                outcomes.append(error.status)
            finally:
                await generation.aclose()

        await asyncio.gather(*(one(number) for number in range(100)))
        assert len(outcomes) == 100
        assert set(outcomes) >= {200, 400, 499, 502}
        assert bench.books_are_empty()
        assert all(not member.streams for member in bench.dispatcher.pool._members.values())
    finally:
        await bench.close()
    bench.dispatcher.index.expire(float("inf"))
    assert bench.dispatcher.index.predicted_blocks == 0


async def test_closing_leaves_no_tasks_behind(tmp_path):
    before = asyncio.all_tasks()
    bench = Bench(tmp_path)
    await bench.add("a")
    await bench.add("b", ready=False, unhealthy="Loading.")
    assert bench.view("b").state == "starting"
    with pytest.raises(TimeoutError):
        await bench.dispatcher.wait_ready(2, timeout=0.05)
    await bench.dispatcher.wait_ready(1, timeout=0.5)
    await bench.close()
    await until(lambda: asyncio.all_tasks() == before)


async def test_after_a_restart_of_the_gateway_the_index_is_whole_with_the_first_contact(tmp_path, bench):
    replica = await bench.add("a")
    prompts = [block_digests(list(range(seed * 10_000, seed * 10_000 + 4000)), ROOT, 4) for seed in range(20)]
    replica.blocks["device"] = [digest for prompt in prompts for digest in prompt[:900]]
    replica.blocks["host"] = [digest for prompt in prompts for digest in prompt[800:]]
    replica.log.append([BlocksStored(join_digests(prompts[0]), ROOT)])
    second = PoolDispatcher(PoolConfig(poll_interval=0.02))
    try:
        second.add_worker("a", bench.view("a").url)
        await second.wait_ready(1, 10)
        await until(lambda: second.index.position("a") is not None)
        # No event was needed but the snapshot that the first subscription begins with.
        assert replica.event_subscribers == 2
        for prompt in prompts:
            assert second.residency(prompt) == {"a": 1000}
        assert second.index.lookup_tiers(prompts[3])[1]["a"].host == 100
    finally:
        await second.__aexit__()


async def test_a_receipt_is_kept_with_what_came_of_it(bench):
    replica = await bench.add("a")
    await bench.add("b")
    digests = block_digests(list(range(40)), ROOT, 4)
    replica.log.append([BlocksStored(join_digests(digests[:8]), ROOT)])
    await until(lambda: bench.dispatcher.index.lookup(digests) == {"a": 8})
    generation = await bench.send("req-1", tokens=range(40))
    await everything(generation)
    await generation.aclose()
    (decision,) = bench.dispatcher.router.log.newest(request_id="req-1")
    assert generation.receipt.decision is decision
    assert (decision.worker, decision.num_candidates, decision.tenant, decision.session) == ("a", 2, "t", "s")
    assert decision.outcome.result == "finished"
    assert decision.outcome.time_to_first_token > 0
    assert {name: matched for name, matched, _ in decision.candidates()} == {"a": 32, "b": 0}
    given_up = await bench.send("req-2", tokens=range(40))
    await given_up.aclose()
    (decision,) = bench.dispatcher.router.log.newest(request_id="req-2")
    assert (decision.outcome.result, decision.outcome.time_to_first_token) == ("abandoned", None)
    replica.default = refusal(500)
    moved = await bench.send("req-3", tokens=range(40))
    await everything(moved)
    await moved.aclose()
    results = [(d.worker, d.outcome.result) for d in bench.dispatcher.router.log.newest(request_id="req-3")]
    assert results == [("b", "finished"), ("a", "failed")]
