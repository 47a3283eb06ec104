"""The way of a request to a worker and back, and clients that leave it early."""

import asyncio

import pytest
from dispatch_bench import ROOT, Bench, everything
from fake_replica import DROP, HANG, Wait, answer, refusal, until

from gateway.router.config import RouterConfig
from gateway.turn import TurnError
from gateway.workers.protocol import Failed, Started
from prefix_cache.events import BlocksStored
from prefix_cache.hashing import block_digests, join_digests, pack_tokens


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


async def test_only_what_is_delivered_whole_may_be_gathered(bench):
    replica = await bench.add("a", can_gather=True)
    for number, whole in enumerate((False, True)):
        generation = await bench.send(f"r{number}", whole=whole)
        await everything(generation)
        await generation.aclose()
    assert [request.gather for request in replica.requests] == [0.0, 0.2]


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
