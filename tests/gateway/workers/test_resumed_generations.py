"""A generation outlives its worker: what came stays, another goes on, and whoever reads notices nothing but the pause."""

import asyncio

import pytest
from dispatch_bench import Bench
from fake_replica import DROP, HANG, FakeReplica, Wait, answer, refusal, until

from gateway.turn import TurnError
from gateway.workers.protocol import Done, Failed, Finished, ResumedChoice, Started, TokenLogprob, Tokens
from prefix_cache.hashing import pack_tokens


def ids(*tokens):
    return ResumedChoice(packed_token_ids=pack_tokens(tokens))


def done(tokens, cached=0, queue=0.0, prefill=0.0, decode=0.0):
    return Done(40, tokens, cached, queue, prefill, decode, 0)


class ResumingBench(Bench):
    """Workers that can go on with what others began. `gate`: what was sent before it has been read."""

    def __init__(self, tmp_path, **config):
        super().__init__(tmp_path, **config)
        self.gate = asyncio.Event()

    async def everything(self, generation, before=0):
        """All chunks; the gate opens once `before` of them were read."""
        chunks = []
        if before == 0:
            self.gate.set()
        async for chunk in generation.chunks():
            chunks.append(chunk)
            if len(chunks) == before:
                self.gate.set()
        return chunks

    async def tokens_and_end(self, generation, before=0):
        chunks = await self.everything(generation, before)
        assert isinstance(chunks[-1], Done)
        await generation.aclose()
        return [token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.token_ids], chunks[-1]

    def broken_off(self):
        """Two tokens, and no more."""
        return [*answer((1, 2))[:3], Wait(self.gate), DROP]

    async def pair(self, **fields):
        first = await self.add("a", can_resume=True, **fields)
        first.default = self.broken_off()
        generation = await self.send("id", seed=5)
        return first, await self.add("b", can_resume=True, instance="life-b", **fields), generation


@pytest.fixture
async def bench(tmp_path):
    bench = ResumingBench(tmp_path, resume_wait=0.2)
    yield bench
    await bench.close()


async def test_another_goes_on_where_the_lost_one_stood(bench):
    first, second, generation = await bench.pair()
    second.scripts.append(
        [Started(40, 36, 0.5), Tokens((3,)), Tokens((4, 5)), Finished("stop", 0, "x"), done(3, 36, 0.5, 2, 1)]
    )
    assert generation.receipt.worker == "a"
    chunks = await bench.everything(generation, 2)
    *before, last = chunks
    assert before == [Tokens((1,)), Tokens((2,)), Tokens((3,)), Tokens((4, 5)), Finished("stop", 0, "x")]
    # The prompt counts once, with what the first one had cached, and all tokens count.
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (40, 5, 0)
    assert last.prefill_seconds >= 2
    assert last.decode_seconds >= 1
    (request,) = second.requests
    assert request.resume == (ids(1, 2),)
    assert (request.request_id, request.sampling.seed, request.packed_token_ids) == (
        "id.1",
        5,
        first.requests[0].packed_token_ids,
    )
    assert first.requests[0].resume == ()
    assert (generation.receipt.worker, generation.receipt.reason) == ("b", "resumed")
    newest, lost = bench.dispatcher.router.log.newest(request_id="id")
    assert (newest.worker, newest.reason, newest.outcome.result) == ("b", "resumed", "finished")
    assert (lost.worker, lost.outcome.result) == ("a", "failed")
    (migration,) = generation.migrations
    assert (migration.lost, migration.worker, migration.tokens) == ("a", "b", 2)
    assert "in the middle" in migration.why or "broke off" in migration.why
    assert bench.books_are_empty()
    await generation.aclose()
    assert second.aborted == []


async def test_a_seed_that_nobody_chose_is_the_gateways(bench):
    first, second = await bench.add("a", can_resume=True), await bench.add("b", can_resume=True, instance="life-b")
    for replica in (first, second):
        replica.scripts.append([*answer((1,))[:2], Wait(bench.gate), DROP])
        replica.default = [Started(40, 0, 0), Tokens((2,)), Finished("length"), done(1)]
    seeds = []
    for _ in range(2):
        await bench.tokens_and_end(await bench.send(temperature=1.0), 1)
    for request in (*first.requests, *second.requests):
        assert request.sampling.seed is not None
        seeds.append(request.sampling.seed)
    assert len(seeds) > len(set(seeds)) > 1


async def test_a_worker_that_cannot_be_resumed_gets_no_seed_and_no_second_worker(bench):
    first = await bench.add("a")
    first.default = bench.broken_off()
    generation = await bench.send()
    await bench.add("b", can_resume=True, instance="life-b")
    with pytest.raises(TurnError, match="Worker a was lost while it generated") as caught:
        await bench.everything(generation, 2)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (502, "worker_lost", 0.0)
    assert first.requests[0].sampling.seed is None
    assert bench.replicas["b"].requests == []
    assert generation.migrations == ()
    assert bench.books_are_empty()


async def test_one_that_cannot_resume_is_not_asked_to(bench):
    first = await bench.add("a", can_resume=True)
    first.scripts.append(bench.broken_off())
    generation = await bench.send()
    await bench.add("b", instance="life-b")
    first.default = [Failed("engine_failed", "It is broken.")]
    with pytest.raises(TurnError) as caught:
        await bench.everything(generation, 2)
    assert caught.value.code in ("worker_lost", "engine_failed")
    assert bench.replicas["b"].requests == []
    assert bench.books_are_empty()


async def test_every_choice_goes_on_from_where_it_stood(bench):
    first = await bench.add("a", can_resume=True)
    logprob = TokenLogprob(7, -0.5)
    first.default = [
        Started(40, 8, 0),
        Tokens((1, 2), 0),
        Tokens((7,), 1, (logprob,)),
        Finished("stop", 1),
        Tokens((4,), 2),
        b'{"type":"tokens","token_ids":[9',
        Wait(bench.gate),
        DROP,
    ]
    generation = await bench.send(n=4, temperature=0.7)
    second = await bench.add("b", can_resume=True, instance="life-b")
    second.default = [
        Started(40, 40, 0),
        Finished("length", 0),
        Tokens((5,), 2),
        Tokens((6,), 3),
        Finished("length", 3),
        Finished("length", 2),
        done(2),
    ]
    chunks = await bench.everything(generation, 4)
    assert second.requests[0].resume == (ids(1, 2), ResumedChoice(finished=True), ids(4), ids())
    assert second.requests[0].sampling.seed == first.requests[0].sampling.seed is not None
    assert [chunk for chunk in chunks if isinstance(chunk, Tokens)] == [
        Tokens((1, 2), 0),
        Tokens((7,), 1, (logprob,)),
        Tokens((4,), 2),
        Tokens((5,), 2),
        Tokens((6,), 3),
    ]
    assert sorted(chunk.index for chunk in chunks if isinstance(chunk, Finished)) == [0, 1, 2, 3]
    assert (chunks[-1].completion_tokens, chunks[-1].cached_tokens) == (6, 8)
    await generation.aclose()


async def test_lost_after_the_last_word_but_one(bench):
    first = await bench.add("a", can_resume=True)
    first.default = [Started(40, 8, 0), Tokens((1, 2)), Finished("stop"), Wait(bench.gate), DROP]
    tokens, last = await bench.tokens_and_end(await bench.send(), 2)
    assert (tokens, last.prompt_tokens, last.completion_tokens, last.cached_tokens) == ([1, 2], 40, 2, 8)
    assert len(first.requests) == 1
    assert bench.books_are_empty()


@pytest.mark.parametrize("resuming", [True, False])
async def test_lost_before_the_first_token_begins_anew_anywhere(bench, resuming):
    first = await bench.add("a", can_resume=resuming)
    first.default = [Started(40, 8, 0), Wait(bench.gate), DROP]
    generation = await bench.send(seed=1)
    await generation.started()
    second = await bench.add("b", instance="life-b")
    second.default = answer((3, 4), cached=4, prompt=40)
    tokens, last = await bench.tokens_and_end(generation)
    assert (tokens, last.completion_tokens, last.cached_tokens) == ([3, 4], 2, 4)
    assert second.requests[0].resume == ()
    assert generation.receipt.reason != "resumed"
    assert bench.books_are_empty()


@pytest.mark.parametrize("code", ["shutting_down", "engine_failed"])
async def test_a_worker_that_says_it_is_going_is_left_in_time(bench, code):
    first = await bench.add("a", can_resume=True)
    first.default = [*answer((1, 2))[:3], Failed(code, "Going.")]
    generation = await bench.send()
    second = await bench.add("b", can_resume=True, instance="life-b")
    second.default = [Started(40, 0, 0), Tokens((3,)), Finished("stop"), done(1)]
    assert (await bench.tokens_and_end(generation, 2))[0] == [1, 2, 3]


async def test_the_only_worker_is_waited_for_while_it_restarts(bench):
    patient = ResumingBench(bench.tmp_path, resume_wait=20.0)
    try:
        first = await patient.add("a", can_resume=True)
        go = asyncio.Event()
        first.default = [*answer((1, 2))[:3], Wait(go), DROP]
        generation = await patient.send(seed=3)
        chunks = generation.chunks()
        assert [await anext(chunks), await anext(chunks)] == [Tokens((1,)), Tokens((2,))]
        rest = asyncio.ensure_future(anext(chunks))
        path = patient.view("a").url.removeprefix("unix:")
        await first.stop()
        await until(lambda: patient.state("a") == "down")
        assert not rest.done()
        patient.replicas["a2"] = successor = FakeReplica(instance="life-2", can_resume=True)
        successor.default = [Started(40, 0, 0), Tokens((3,)), Finished("stop"), done(1)]
        await successor.start(path)
        assert await asyncio.wait_for(rest, 5) == Tokens((3,))
        assert [chunk async for chunk in chunks] == [Finished("stop"), successor_done(patient, generation)]
        assert successor.requests[0].resume == (ids(1, 2),)
        assert patient.books_are_empty()
        await generation.aclose()
    finally:
        await patient.close()


def successor_done(bench, generation):
    """Whatever the seconds, of three tokens."""

    class AnyDone:
        def __eq__(self, other):
            return (other.prompt_tokens, other.completion_tokens) == (40, 3)

    return AnyDone()


async def test_a_broken_connection_to_the_only_worker_is_no_end(bench):
    only = await bench.add("a", can_resume=True)
    only.scripts.append(bench.broken_off())
    only.default = [Started(40, 0, 0), Tokens((3,)), Finished("stop"), done(1)]
    generation = await bench.send()
    assert (await bench.tokens_and_end(generation, 2))[0] == [1, 2, 3]
    assert [request.request_id for request in only.requests] == ["r", "r.1"]
    assert generation.migrations[0].worker == "a"


async def test_a_successor_with_other_weights_does_not_go_on(bench):
    first = await bench.add("a", can_resume=True)
    go = asyncio.Event()
    first.default = [*answer((1, 2))[:3], Wait(go), DROP]
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    path = bench.view("a").url.removeprefix("unix:")
    await first.stop()
    bench.replicas["a2"] = other = FakeReplica(instance="life-2", can_resume=True, namespace="11" * 16)
    await other.start(path)
    await until(lambda: bench.state("a") == "ready" and bench.view("a").info.instance == "life-2")
    with pytest.raises(TurnError, match="Nobody could go on with it") as caught:
        _ = [chunk async for chunk in chunks]
    assert caught.value.code == "worker_lost"
    assert other.requests == []


async def test_nobody_comes(bench):
    first = await bench.add("a", can_resume=True)
    go = asyncio.Event()
    first.default = [*answer((1, 2))[:3], Wait(go), DROP]
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    bench.dispatcher.remove_worker("a")
    with pytest.raises(TurnError, match="Nobody could go on with it") as caught:
        async for _ in chunks:
            pass
    assert caught.value.code == "worker_lost"


async def test_leaving_while_nobody_goes_on(bench):
    patient = ResumingBench(bench.tmp_path, resume_wait=60.0)
    try:
        first = await patient.add("a", can_resume=True)
        first.default = [*answer((1, 2))[:3], HANG]
        generation = await patient.send()
        chunks = generation.chunks()
        await anext(chunks)
        await anext(chunks)
        rest = asyncio.ensure_future(anext(chunks))
        patient.dispatcher.remove_worker("a")
        await asyncio.sleep(0.05)
        await generation.aclose()
        with pytest.raises(TurnError) as caught:
            await asyncio.wait_for(rest, 5)
        assert caught.value.code == "aborted"
    finally:
        await patient.close()


async def test_a_request_that_kills_every_worker_stops_at_some(tmp_path):
    bench = ResumingBench(tmp_path, resume_wait=5.0, max_attempts=2, max_migrations=3)
    try:
        for name in "abcdefgh":
            replica = await bench.add(name, can_resume=True, instance=name)
            replica.default = [Started(40, 0, 0), Tokens((1,)), b"garbage\n"]
        with pytest.raises(TurnError, match=r"the 4\. worker that this request lost") as caught:
            await bench.everything(await bench.send())
        assert caught.value.code == "worker_lost"
        assert sum(len(replica.requests) for replica in bench.replicas.values()) == 4
        for replica in bench.replicas.values():
            replica.requests.clear()
            replica.default = [Started(40, 0, 0), b"garbage\n"]
        with pytest.raises(TurnError):
            await bench.everything(await bench.send())
        assert sum(len(replica.requests) for replica in bench.replicas.values()) == 3
        assert bench.books_are_empty()
    finally:
        await bench.close()


async def test_a_refusal_to_go_on_is_not_the_clients_fault(bench):
    _, second, generation = await bench.pair()
    second.default = refusal(400, "invalid_resume", "It does not fit.", "resume[0]")
    with pytest.raises(TurnError, match=r"Worker b refused to go on with it: It does not fit\.") as caught:
        await bench.everything(generation, 2)
    assert (caught.value.status, caught.value.param) == (502, None)
    assert bench.books_are_empty()


@pytest.mark.parametrize(
    ("nonsense", "why"),
    [
        ([Tokens(tuple(range(20)))], "more than the 12 tokens"),
        ([Tokens((3,), 1)], "choice 1, which nobody asked for"),
        ([Finished("stop"), Tokens((3,))], "went on with choice 0 after its end"),
        ([Finished("stop", 5)], "choice 5, which nobody asked for"),
        ([done(2)], "ended its answer before the generation"),
        ([b"{}\n"], "not of the protocol"),
        ([b'{"type":"tokens","token_ids":["x"]}\n'], "not of the protocol"),
    ],
)
async def test_a_worker_that_talks_nonsense_is_lost(bench, nonsense, why):
    first = await bench.add("a", can_resume=True)
    first.default = [*answer((1, 2))[:3], *nonsense, HANG]
    generation = await bench.send(max_tokens=12)
    second = await bench.add("b", can_resume=True, instance="life-b")
    second.default = [Started(40, 0, 0), Tokens((3,)), Finished("stop"), done(1)]
    if isinstance(nonsense[0], Finished) and nonsense[0].index == 0:
        assert (await bench.tokens_and_end(generation, 2))[0] == [1, 2]  # it had ended; what came after does not count
        return
    assert (await bench.tokens_and_end(generation, 2))[0] == [1, 2, 3]
    assert why in generation.migrations[0].why
    await until(lambda: first.left)
    assert bench.books_are_empty()
