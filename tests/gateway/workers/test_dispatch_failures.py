"""Requests that a worker fails: where they go, and what their client gets."""

import pytest
from dispatch_bench import everything
from fake_replica import DROP, answer, refusal

from gateway.router.config import RouterConfig
from gateway.router.policies import make_policy
from gateway.turn import TurnError
from gateway.workers.protocol import Done, Failed, Finished, Started


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
