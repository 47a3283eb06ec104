"""vLLM as a worker, against a server that says what vLLM 0.32 said (the real one: tests/live)."""

import asyncio
import dataclasses
import json

import msgspec
import pytest
from fake_replica import until
from raw_worker import END, RawWorker, head, piece, vllm_metrics, whole
from zmq_publisher import Publisher

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import Prompt, SessionRef, TurnError
from gateway.workers.base import WorkerRefusedError
from gateway.workers.foreign import adapter_namespace, foreign_namespace
from gateway.workers.protocol import Done, Finished, GenerateRequest, SamplingParams, Started, TokenLogprob, Tokens
from gateway.workers.spec import WorkerSpec, parse_worker
from gateway.workers.transport import Patience
from gateway.workers.vllm.client import VllmClient
from gateway.workers.vllm.metrics import parse_metrics
from prefix_cache.hashing import block_digests, pack_tokens, root_digest
from prefix_cache.packed_tokens import PackedTokens
from prefix_cache.vllm_wire import ForeignCleared, ForeignRemoved, ForeignStored

ROOT = foreign_namespace("m", 4)


def event(**fields):
    return piece(b"data: " + json.dumps(fields).encode() + b"\n\n")


def choice(ids, index=0, **more):
    return {"index": index, "text": "?", "token_ids": list(ids), **more}


def answer(*events):
    return [head(200, "text/event-stream; charset=utf-8"), *events, piece(b"data: [DONE]\n\n"), END]


@pytest.fixture
async def worker():
    async with RawWorker("vllm") as made:
        yield made


@pytest.fixture
async def client(worker):
    made = VllmClient(worker.spec, Patience())
    await made.info()
    yield made
    await made.aclose()


def request(**fields):
    sampling = SamplingParams(**fields.pop("sampling", {"max_tokens": 5}))
    return GenerateRequest(request_id="r-1", packed_token_ids=pack_tokens([1, 2, 3]), sampling=sampling, **fields)


async def collect(client, made):
    stream = await client.generate(made, {"traceparent": "tp"})
    chunks = [chunk async for chunk in stream]
    await stream.finish()
    return chunks


async def test_events_become_chunks(worker, client):
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    worker.script = answer(
        event(choices=[choice([7], prompt_token_ids=[1, 2, 3])]),
        piece(b": a comment\r\n\r\n"),
        event(choices=[choice([8, 9], finish_reason="stop", stop_reason="x")]),
        event(choices=[], usage=usage),
    )
    chunks = await collect(client, request())
    assert chunks[:-1] == [
        Started(3, 0, 0.0, cached_known=False),
        Tokens((7,)),
        Tokens((8, 9)),
        Finished("stop", 0, "x"),
    ]
    done = chunks[-1]
    assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens, done.cached_known) == (3, 3, 2, True)
    assert 0 <= done.prefill_seconds < 5
    sent = json.loads(worker.requests[0])
    assert (sent["prompt"], sent["model"], sent["max_tokens"], sent["n"]) == ([1, 2, 3], "m", 5, 1)
    assert sent["return_token_ids"] is True
    assert sent["skip_special_tokens"] is False


async def test_what_is_asked_for_is_asked_of_vllm(worker, client):
    worker.script = answer(event(choices=[choice([7], finish_reason="length")]))
    grammar = '{"type":"structural_tag"}'
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 9,
        "stop": ("a",),
        "stop_token_ids": (4,),
        "logit_bias": {5: 1.5},
        "min_tokens": 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
    }
    await collect(client, request(sampling=sampling, grammar=grammar, cache_salt="s", session="k", priority=5))
    sent = json.loads(worker.requests[0])
    expected = {
        **sampling,
        "stop": ["a"],
        "stop_token_ids": [4],
        "logit_bias": {"5": 1.5},
        "structured_outputs": {"structural_tag": grammar},
        "cache_salt": "s",
        "session_id": "k",
        "max_tokens": 997,
    }
    assert {name: sent.get(name) for name in expected} == expected
    assert "priority" not in sent
    await collect(client, request(cache_salt="a/b@c"))
    assert len(json.loads(worker.requests[1])["cache_salt"]) == 64


async def test_greedy_choices_are_one_answer_several_times(worker, client):
    worker.script = answer(event(choices=[choice([7], finish_reason="length")]))
    chunks = await collect(client, request(sampling={"temperature": 0.0, "n": 2, "max_tokens": 1}))
    assert [chunk for chunk in chunks if isinstance(chunk, Tokens)] == [Tokens((7,), 0), Tokens((7,), 1)]
    assert [chunk.index for chunk in chunks if isinstance(chunk, Finished)] == [0, 1]
    assert chunks[-1].completion_tokens == 2
    assert json.loads(worker.requests[0])["n"] == 1


async def test_logprobs_by_token_id(worker, client):
    logprobs = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:9": -0.7, "token_id:7": -0.5}],
        "text_offset": [0],
    }
    worker.script = answer(event(choices=[choice([7], finish_reason="length", logprobs=logprobs)]))
    chunks = await collect(client, request(sampling={"logprobs": 2, "max_tokens": 1}))
    assert chunks[1].logprobs == (TokenLogprob(7, -0.5, ((7, -0.5), (9, -0.7))),)
    assert json.loads(worker.requests[0])["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize(
    ("param", "message", "code"),
    [
        ("input_tokens", "too long", "context_length_exceeded"),
        (None, "This model's maximum context length is 5", "context_length_exceeded"),
        ("structured_outputs", "bad tag", "invalid_grammar"),
        ("temperature", "too hot", "invalid_request"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
async def test_refusals(worker, client, param, message, code, late):
    body = {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}
    worker.script = answer(event(**body)) if late else [whole(json.dumps(body).encode(), 400)]
    with pytest.raises(WorkerRefusedError) as caught:
        await collect(client, request())
    assert (caught.value.status, caught.value.detail.code, caught.value.detail.message) == (400, code, message)


@pytest.fixture
async def dispatcher():
    async with PoolDispatcher(PoolConfig(models=("m",), poll_interval=0.02)) as made:
        yield made


async def ask(dispatcher, tokens, model="m", salt=None, root=ROOT):
    digests = tuple(block_digests(list(tokens), root_digest(root, salt), 4))
    generation = await dispatcher.dispatch(
        request_id="r",
        model=model,
        session=SessionRef("t", None),
        prompt=Prompt(PackedTokens(pack_tokens(tokens)), digests, cache_salt=salt),
        sampling=SamplingParams(max_tokens=1),
        priority=0,
        trace_headers={},
    )
    try:
        started = await generation.started()
        return generation.receipt, started, [chunk async for chunk in generation.chunks()]
    finally:
        await generation.aclose()


async def test_a_refusal_that_comes_late_is_a_400_and_no_failure(worker, dispatcher):
    dispatcher.add_worker("w", worker.spec)
    await until(lambda: dispatcher.pool.member("w").available)
    worker.script = answer(event(error={"message": "Token id 9 is out of vocabulary", "code": 400, "param": None}))
    with pytest.raises(TurnError) as caught:
        await ask(dispatcher, range(3))
    assert (caught.value.status, caught.value.message) == (400, "Token id 9 is out of vocabulary")
    member = dispatcher.pool.member("w")
    assert (member.breaker.failures, member.books.requests) == (0, 0)


def stored(names, tokens, parent=None, **more):
    return ForeignStored(tuple(names), parent, tuple(tokens), 4, **more)


async def joined(dispatcher, worker, publisher, *, replay=True):
    spec = dataclasses.replace(worker.spec, events=publisher.address, replay=publisher.replay if replay else None)
    dispatcher.add_worker("w", spec)
    await publisher.subscribed()
    await until(lambda: dispatcher.index.position("w") is not None)
    return dispatcher.pool.member("w")


def held(dispatcher, tokens, **more):
    return dispatcher.index.lookup(block_digests(list(tokens), root_digest(ROOT, more.get("salt")), 4)).get("w", 0)


async def test_the_index_follows_kv_events(worker, dispatcher):
    async with Publisher() as publisher:
        await publisher.publish(stored([b"a", b"b"], range(8)))  # before anybody listens: replayed
        await joined(dispatcher, worker, publisher)
        await until(lambda: held(dispatcher, range(12)) == 2)
        await publisher.publish(stored([b"c"], range(8, 12), b"b"))
        await until(lambda: held(dispatcher, range(12)) == 3)
        await publisher.publish(stored([b"d"], range(4), salt="s"), stored([b"z"], range(4), b"stranger"))
        await until(lambda: held(dispatcher, range(4), salt="s") == 1)
        await publisher.publish(ForeignRemoved((b"b",)))
        await until(lambda: held(dispatcher, range(12)) == 1)
        worker.script = answer(event(choices=[choice([7], finish_reason="length")]))
        receipt, started, _ = await ask(dispatcher, range(12))
        assert (receipt.matched_tokens, started.cached_tokens, started.cached_known) == (4, 4, False)
        await publisher.publish(ForeignCleared())
        await until(lambda: held(dispatcher, range(4)) == 0)
        (view,) = dispatcher.workers()
        assert view.event_trouble == {"lost": 0, "garbage": 0, "unknown_parent": 1, "not_named": 0}


async def test_lost_events_are_replayed(worker, dispatcher):
    async with Publisher() as publisher:
        member = await joined(dispatcher, worker, publisher)
        await publisher.publish(stored([1], range(4)))
        await until(lambda: held(dispatcher, range(4)) == 1)
        await publisher.publish(stored([2], range(4, 8), 1), lose=True)
        await publisher.publish(stored([3], range(8, 12), 2))
        await until(lambda: held(dispatcher, range(12)) == 3)
        assert publisher.replays == [0, 1]
        assert member.client.events.lost == 0


async def test_events_that_nobody_has_any_more_are_lost_loudly(worker, dispatcher, caplog):
    async with Publisher(keep=1) as publisher:
        member = await joined(dispatcher, worker, publisher)
        await publisher.publish(stored([1], range(4)))
        await until(lambda: held(dispatcher, range(4)) == 1)
        await publisher.publish(stored([2], range(4, 8), 1), lose=True)
        await publisher.publish(stored([9], range(20, 24)))
        await until(lambda: held(dispatcher, range(20, 24)) == 1)
        assert held(dispatcher, range(4)) == 0
        assert member.client.events.lost == 1
        assert "KV events 1 to 1 are lost" in caplog.text
        await publisher.publish(stored([10], range(24, 28), 9))
        await until(lambda: held(dispatcher, range(20, 28)) == 2)


async def test_without_replay_what_comes_later_is_known(worker, dispatcher):
    async with Publisher() as publisher:
        await publisher.publish(stored([1], range(4)))
        member = await joined(dispatcher, worker, publisher, replay=False)
        await publisher.publish(stored([2], range(4, 8), 1), stored([3], range(30, 34)))
        await until(lambda: held(dispatcher, range(30, 34)) == 1)
        assert held(dispatcher, range(8)) == 0
        assert (member.client.events.lost, member.client.events.blocks.unknown_parents) == (0, 1)
        # vLLM tells of blocks that are used again, so that late subscribers learn of them.
        await publisher.publish(stored([1, 2], range(8)))
        await until(lambda: held(dispatcher, range(8)) == 2)


async def test_garbage_and_duplicates_change_nothing(worker, dispatcher):
    async with Publisher() as publisher:
        member = await joined(dispatcher, worker, publisher)
        await publisher.publish(stored([1], range(4)))
        await publisher.publish(raw=b"\xc1 garbage")
        await publisher.publish(raw=msgspec.msgpack.encode([1.0, [["BlockStored", "no", 1, 2, 3]]]))
        publisher.next -= 1
        await publisher.publish(stored([8], range(40, 44)))  # a number that was seen before
        await publisher.publish(stored([2], range(4, 8), 1))
        await until(lambda: held(dispatcher, range(8)) == 2)
        assert held(dispatcher, range(40, 44)) == 0
        assert member.client.events.garbage == 2


async def test_a_new_life_has_nothing_of_the_old_one(worker, dispatcher):
    async with Publisher() as publisher:
        await joined(dispatcher, worker, publisher)
        await publisher.publish(stored([1], range(4)))
        await until(lambda: held(dispatcher, range(4)) == 1)
        worker.life = "2"
        publisher.restart()
        await publisher.subscribed()
        await until(lambda: held(dispatcher, range(4)) == 0)
        await publisher.publish(stored([5], range(50, 54)))
        await until(lambda: held(dispatcher, range(50, 54)) == 1)
        assert dispatcher.index.position("w").instance == "vllm-2.000-m"


async def test_adapters_are_models_of_their_own(worker):
    worker.adapters = ["lora"]
    async with PoolDispatcher(PoolConfig(models=("m", "lora"), poll_interval=0.02)) as dispatcher, Publisher() as publisher:
        await joined(dispatcher, worker, publisher)
        root = adapter_namespace(ROOT, "lora")
        assert dispatcher.pool_info("lora").namespace == root.hex()
        assert dispatcher.models() == ("m", "lora")
        await publisher.publish(stored([1], range(4), lora_name="lora"), stored([2], range(4), lora_name="unknown"))
        await until(lambda: dispatcher.index.lookup(block_digests(list(range(4)), root, 4)) == {"w": 1})
        assert held(dispatcher, range(4)) == 0
        worker.script = answer(event(choices=[choice([7], finish_reason="length")]))
        receipt, _, _ = await ask(dispatcher, range(4), model="lora", root=root)
        await ask(dispatcher, range(4))
        assert [json.loads(body)["model"] for body in worker.requests] == ["lora", "m"]
        assert receipt.matched_tokens == 4
        with pytest.raises(TurnError, match="'m', 'lora'"):
            await ask(dispatcher, range(4), model="stranger")


def test_metrics():
    read = parse_metrics(vllm_metrics("12.5", running=3, waiting=2, block_size=32))
    assert (read.running, read.waiting, read.cache_usage, read.life) == (3, 2, 0.25, "12.500")
    assert (read.block_size, read.num_blocks) == (32, 40)
    assert parse_metrics(b"turnkeep_x 1\n") is None
    two = vllm_metrics(running=1) + vllm_metrics(running=4).replace(b'engine="0"', b'engine="1"')
    assert parse_metrics(two).running == 5
    assert parse_metrics(vllm_metrics().replace(b"waiting{", b'waiting{x="}" ,')) is not None
    assert parse_metrics(b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://", "must be http"),
        ("vlm=http://a:1", "'vlm' is not known"),
        ("vllm=ftp://a", "must be http"),
        ("vllm=http://a:1,colour=red", "'colour=red' is no option"),
        ("vllm=http://a:1,events", "'events' is no option"),
        ("vllm=http://a:1,events=http://a", "events takes tcp://"),
        ("vllm=http://a:1,replay=tcp://a:1", "replay without events"),
        ("vllm=http://a:1,events=tcp://{host}:1", "hosts that are looked up"),
        ("http://a:1,events=tcp://a:1", "not for turnkeep"),
        ("vllm=http://a:1,key-env=NOPE", "NOPE"),
        ("vllm=http://a:1,concurrency=many", "whole number"),
        ("vllm=http://a:1,concurrency=0", "at least 1"),
    ],
)
def test_workers_that_cannot_be_meant(text, says):
    with pytest.raises(ValueError, match=says):
        parse_worker(text, {})


def test_workers_as_text():
    assert parse_worker("http://a:1", {}) == WorkerSpec("http://a:1")
    assert parse_worker("unix:/a=b", {}) == WorkerSpec("unix:/a=b")
    text = "vllm=http://a:1,events=tcp://a:2,replay=tcp://a:3,model=m,key-env=K,concurrency=8"
    spec = parse_worker(text, {"K": "secret"})
    assert spec == WorkerSpec("http://a:1", "vllm", "tcp://a:2", "tcp://a:3", "", "m", "secret", 8)
    assert "secret" not in repr(spec)


async def test_the_key_is_sent(worker):
    client = VllmClient(dataclasses.replace(worker.spec, api_key="secret"), Patience())
    await client.info()
    await client.aclose()
    assert worker.heads[-1].split("\r\n")[0].startswith("GET")
    assert "Authorization: Bearer secret" in worker.heads[-1]


async def test_a_stream_may_be_waited_for_in_pieces(worker, client):
    """Cancelling a wait loses nothing, wherever the bytes are cut."""
    text = (
        b"".join(b"data: " + json.dumps({"choices": [choice([token])]}).encode() + b"\n\n" for token in range(5))
        + b'data: {"choices":[{"index":0,"token_ids":[],"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    worker.script = [head(200, "text/event-stream"), *(piece(text[at : at + 7]) for at in range(0, len(text), 7)), END]
    stream = await client.generate(request(), {})
    seen = []
    while not (seen and isinstance(seen[-1], Done)):
        try:
            async with asyncio.timeout(0.0005):
                seen.append(await anext(stream))
        except TimeoutError:
            pass
    assert [chunk.token_ids[0] for chunk in seen if isinstance(chunk, Tokens)] == [0, 1, 2, 3, 4]


async def test_another_model_is_not_taken_for_the_one_that_was_renamed(worker):
    spec = dataclasses.replace(worker.spec, model="nice-name")
    async with PoolDispatcher(PoolConfig(models=("nice-name",), poll_interval=0.02)) as dispatcher:
        dispatcher.add_worker("w", spec)
        member = dispatcher.pool.member("w")
        await until(lambda: member.state.value == "ready")
        worker.model, worker.life = "another", "2"
        await until(lambda: member.state.value == "mismatched")
        assert "it serves model 'another'" in member.detail
        worker.model, worker.life = "m", "3"
        await until(lambda: member.state.value == "ready")


async def test_a_lost_tail_is_found_while_nothing_comes(worker, dispatcher, monkeypatch):
    """Nobody sees a gap behind the last batch; so while it is silent, the replay is asked whether there is one."""
    monkeypatch.setattr("gateway.workers.vllm.events._HEARTBEAT_SECONDS", 0.05)
    async with Publisher() as publisher:
        member = await joined(dispatcher, worker, publisher)
        await publisher.publish(stored([1], range(4)), lose=True)
        await until(lambda: held(dispatcher, range(4)) == 1)
        assert member.client.events.lost == 0


async def test_a_publisher_that_is_gone_is_no_silence(worker, dispatcher, monkeypatch):
    """No heartbeat stands for what cannot be reached: the stream counts as stale."""
    monkeypatch.setattr("gateway.workers.vllm.events._HEARTBEAT_SECONDS", 0.02)
    async with Publisher() as publisher:
        member = await joined(dispatcher, worker, publisher)
        await until(lambda: len(publisher.replays) > 3)
        assert member.events_lag < 2
        member.client.events._timeout = 0.05
        publisher.stop_replays()
        lag = member.events_lag
        await until(lambda: member.events_lag > lag + 0.5)
