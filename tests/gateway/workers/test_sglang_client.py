"""SGLang as a worker, against a stand-in: a server that answers as SGLang's source says. SGLang itself needs a GPU or a build
of its own, and has not been run behind this."""

import dataclasses
import json

import msgspec
import pytest
from fake_replica import until
from raw_worker import END, RawWorker, head, piece, whole
from zmq_publisher import Publisher

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.workers.base import WorkerRefusedError
from gateway.workers.foreign import foreign_namespace
from gateway.workers.protocol import Done, Finished, GenerateRequest, SamplingParams, Started, TokenLogprob, Tokens
from gateway.workers.sglang.client import SglangClient
from gateway.workers.transport import Patience
from prefix_cache.hashing import block_digests, pack_tokens


def event(**fields):
    return piece(b"data: " + json.dumps(fields).encode() + b"\n\n")


def said(ids, count, finish=None, index=0, **meta):
    meta = {"id": "r", "prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 2, "finish_reason": finish, **meta}
    return event(text="?", output_ids=list(ids), meta_info=meta, index=index)


def answer(*events):
    return [head(200, "text/event-stream"), *events, piece(b"data: [DONE]\n\n"), END]


@pytest.fixture
async def worker():
    async with RawWorker("sglang") as made:
        made.page_size = 16
        yield made


@pytest.fixture
async def client(worker):
    made = SglangClient(worker.spec, Patience())
    await made.info()
    yield made
    await made.aclose()


def request(**fields):
    sampling = SamplingParams(**fields.pop("sampling", {"max_tokens": 5}))
    return GenerateRequest(request_id="r-1", packed_token_ids=pack_tokens([1, 2, 3]), sampling=sampling, **fields)


async def collect(client, made):
    stream = await client.generate(made, {})
    chunks = [chunk async for chunk in stream]
    await stream.finish()
    return chunks


@pytest.mark.parametrize("incremental", [False, True])
async def test_events_become_chunks_whatever_they_repeat(worker, client, incremental):
    steps = [([7], 1, None), ([8, 9], 3, None), ([2], 4, {"type": "stop", "matched": 2})]
    whole_so_far, events = [], []
    for ids, count, finish in steps:
        whole_so_far += ids
        events.append(said(ids if incremental else whole_so_far, count, finish))
    worker.script = answer(*events)
    chunks = await collect(client, request())
    assert chunks[:-1] == [Started(3, 2, 0.0), Tokens((7,)), Tokens((8, 9)), Tokens((2,)), Finished("stop", 0, 2)]
    done = chunks[-1]
    assert isinstance(done, Done)
    assert (done.completion_tokens, done.cached_tokens, done.cached_known) == (4, 2, True)


async def test_choices_are_told_apart(worker, client):
    length = {"type": "length", "length": 1}
    worker.script = answer(said([5], 1, length, index=1), said([4], 1, length, index=0))
    chunks = await collect(client, request(sampling={"n": 2, "max_tokens": 1}))
    assert [chunk for chunk in chunks if isinstance(chunk, Tokens)] == [Tokens((5,), 1), Tokens((4,), 0)]
    assert chunks[-1].completion_tokens == 2


async def test_what_is_asked_for_is_asked_of_sglang(worker, client):
    worker.script = answer(said([7], 1, {"type": "length", "length": 1}))
    sampling = {"temperature": 0.5, "top_k": 0, "seed": 9, "stop": ("a",), "stop_token_ids": (4,), "logit_bias": {5: 1.5}}
    grammar = '{"type":"structural_tag"}'
    await collect(client, request(sampling=sampling, grammar=grammar, cache_salt="s", model="adapter", priority=3))
    sent = json.loads(worker.requests[0])
    assert worker.heads[-1].startswith("POST /generate ")
    assert {name: value for name, value in sent.items() if name != "sampling_params"} == {
        "rid": "r-1",
        "input_ids": [1, 2, 3],
        "stream": True,
        "extra_key": "s",
        "lora_path": "adapter",
    }
    expected = {
        "temperature": 0.5,
        "top_k": -1,
        "sampling_seed": 9,
        "stop": ["a"],
        "stop_token_ids": [4],
        "logit_bias": {"5": 1.5},
        "structural_tag": grammar,
        "max_new_tokens": 997,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    assert {name: sent["sampling_params"].get(name) for name in expected} == expected


@pytest.mark.parametrize("incremental", [False, True])
async def test_logprobs(worker, client, incremental):
    first, second = [-0.5, 7, None], [-0.25, 8, None]
    tops = [[[-0.5, 7, None], [-0.7, 9, None]], [[-0.25, 8, None]]]
    later = (slice(1, None) if incremental else slice(None),)[0]
    worker.script = answer(
        said([7], 1, output_token_logprobs=[first], output_top_logprobs=tops[:1]),
        said(
            [7, 8][later],
            2,
            {"type": "length", "length": 2},
            output_token_logprobs=[first, second][later],
            output_top_logprobs=tops[later],
        ),
    )
    chunks = await collect(client, request(sampling={"logprobs": 2, "max_tokens": 2}))
    assert [chunk.logprobs for chunk in chunks if isinstance(chunk, Tokens)] == [
        (TokenLogprob(7, -0.5, ((7, -0.5), (9, -0.7))),),
        (TokenLogprob(8, -0.25, ((8, -0.25),)),),
    ]
    sent = json.loads(worker.requests[0])
    assert (sent["return_logprob"], sent["top_logprobs_num"]) == (True, 2)


@pytest.mark.parametrize("late", [False, True])
async def test_refusals(worker, client, late):
    error = {"error": {"message": "The input (2000 tokens) is longer than the model's context length (1000 tokens)."}}
    worker.script = answer(event(**error)) if late else [whole(json.dumps(error).encode(), 400)]
    with pytest.raises(WorkerRefusedError) as caught:
        await collect(client, request())
    assert (caught.value.status, caught.value.detail.code) == (400, "context_length_exceeded")


async def test_an_abort_is_told(worker, client):
    await client.abort("r-7")
    assert json.loads(worker.aborted[0]) == {"rid": "r-7"}


async def test_what_it_is_and_how_it_is(worker, client):
    info = await client.info()
    assert (info.model, info.block_size, info.max_model_len, info.max_concurrency) == ("m", 16, 1000, 7)
    assert info.namespace == foreign_namespace("m", 16).hex()
    stats = await client.stats()
    assert (stats.instance, stats.running, stats.waiting, stats.num_blocks, stats.free_blocks) == (info.instance, 0, 0, 25, 19)
    worker.life = "2"
    assert (await client.stats()).instance != info.instance


async def test_kv_events_as_arrays_and_a_replay_without_topics(worker):
    """SGLang writes events as arrays, and leaves the topic out of what it replays."""
    async with PoolDispatcher(PoolConfig(models=("m",), poll_interval=0.02)) as dispatcher, Publisher() as publisher:
        publisher.replays_topic = False
        store = ["BlockStored", [11, 12], None, list(range(32)), 16, None]
        await publisher.publish(raw=msgspec.msgpack.encode([1.0, [store]]))
        spec = dataclasses.replace(worker.spec, events=publisher.address, replay=publisher.replay)
        dispatcher.add_worker("w", spec)
        await publisher.subscribed()
        digests = block_digests(list(range(48)), foreign_namespace("m", 16), 16)
        await until(lambda: dispatcher.index.lookup(digests) == {"w": 2})
        more = ["BlockStored", [13], 12, list(range(32, 48)), 16, None]
        await publisher.publish(raw=msgspec.msgpack.encode([1.0, [more]]))
        await until(lambda: dispatcher.index.lookup(digests) == {"w": 3})
        await publisher.publish(raw=msgspec.msgpack.encode([1.0, [["BlockRemoved", [12]]]]))
        await until(lambda: dispatcher.index.lookup(digests) == {"w": 1})


async def test_pages_of_one_token_are_not_followed(worker, caplog):
    worker.page_size = 1
    client = SglangClient(dataclasses.replace(worker.spec, events="tcp://127.0.0.1:9"), Patience())
    for _ in range(2):
        info = await client.info()
    await client.aclose()
    assert (info.capabilities.kv_events, info.block_size) == (False, 16)
    assert caplog.text.count("--page-size 16") == 1
