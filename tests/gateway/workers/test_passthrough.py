"""Opaque workers through a whole gateway: bodies and answers byte for byte, over real sockets."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fake_replica import until
from raw_worker import DROP, END, HANG, RawWorker, head, piece, whole

from cli.serving import ReplicaPlan, ServePlan, open_gateway
from gateway.config import GatewayConfig, HttpConfig
from gateway.dispatch import PoolConfig
from gateway.passthrough.text import answer_limit, chunk_digests, prompt_text
from gateway.passthrough.usage import AnswerReader
from gateway.workers.opaque.memory import ChunkMemory
from gateway.workers.spec import WorkerSpec

ROOT = bytes(16)


class Front:
    def __init__(self, running, http):
        self.running, self.http = running, http
        self.index, self.pool = running.dispatcher.index, running.dispatcher.pool

    async def post(self, body, path="/v1/chat/completions", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.running.url + path, data=data, headers=headers) as response:
            return response, await response.read()

    async def get(self, path):
        async with self.http.get(self.running.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def front(*workers, **http):
    plan = ServePlan(
        GatewayConfig(models=(), http=HttpConfig(port=0, **http)),
        ReplicaPlan(0),
        workers=tuple(WorkerSpec(worker.spec.url, "openai", api_key="upstream-secret") for worker in workers),
        pool=PoolConfig(poll_interval=0.02, max_attempts=2),
    )
    async with open_gateway(plan) as running, aiohttp.ClientSession() as client:
        made = Front(running, client)
        await until(lambda: all(view.state == "ready" for view in running.workers()))
        await until(lambda: all(running.dispatcher.index.position(view.name) for view in running.workers()))
        yield made


@pytest.fixture
async def worker():
    async with RawWorker("openai") as made:
        yield made


def chat(*texts, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **more}


def answer(cached=None, prompt=100, **more):
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, **details}
    return [whole(json.dumps({"choices": [], "usage": usage, **more}).encode())]


SSE = b'data: {"choices":[{"delta":{"content":"\xc3\xa9"}}]}\r\n\r\n: hm\n\n'
SSE += b'data: {"usage":{"prompt_tokens":9}}\n\ndata: [DONE]\n\n'


async def test_body_and_answer_go_through_byte_for_byte(worker):
    body = b'{ "messages" : [{"role":"user","content":"h\\u00e9"}],\n "x_unknown":1e5 , "model":"m"}  '
    reply = b'{"id" :  "x", "choices":[], "made_up": [1.50]}\n\n'
    worker.script = [whole(reply, 200).replace(b"\r\n\r\n", b"\r\nX-Their-Header: yes\r\nSet-Cookie: a=b\r\n\r\n", 1)]
    async with front(worker) as gateway:
        response, got = await gateway.post(
            body, **{"X-Custom": "kept", "Authorization": "Bearer client-secret", "Cookie": "c=d"}
        )
        assert (response.status, got, worker.requests) == (200, reply, [body])
        assert response.headers["X-Their-Header"] == "yes"
        assert "Set-Cookie" not in response.headers
        assert response.headers["X-Turnkeep-Replica"] == "worker-0"
        sent = worker.heads[-1]
        assert sent.startswith("POST /v1/chat/completions ")
        assert "X-Custom: kept" in sent
        assert "client-secret" not in sent
        assert "c=d" not in sent
        assert "Authorization: Bearer upstream-secret" in sent
        response, got = await gateway.post(gzip.compress(body), **{"Content-Encoding": "gzip"})
        assert (got, worker.requests[-1]) == (reply, body)
        assert "gzip" not in worker.heads[-1]


@pytest.mark.parametrize("cut", [1, 5, 1000])
async def test_a_stream_goes_through_byte_for_byte(worker, cut):
    pieces = [piece(SSE[at : at + cut]) for at in range(0, len(SSE), cut)]
    worker.script = [head(200, "text/event-stream"), *pieces, END]
    async with front(worker) as gateway:
        response, got = await gateway.post(chat("a", stream=True))
        assert (response.status, response.content_type, got) == (200, "text/event-stream", SSE)


async def test_a_stream_is_not_held_back(worker):
    go = asyncio.Event()

    def rest():
        assert go.is_set()
        yield piece(b"data: 2\n\n")

    worker.script = [head(200, "text/event-stream"), piece(b"data: 1\n\n"), go, rest, END]
    async with front(worker) as gateway:
        url = gateway.running.url + "/v1/chat/completions"
        async with gateway.http.post(url, json=chat("a", stream=True)) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            go.set()
            assert await response.content.read() == b"data: 2\n\n"


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_refusal_goes_through_and_is_no_failure(worker, status):
    worker.script = [whole(b'{"error": "their words"}', status)]
    async with front(worker) as gateway:
        response, got = await gateway.post(chat("a"))
        assert (response.status, got) == (status, b'{"error": "their words"}')
        member = gateway.pool.member("worker-0")
        assert (member.breaker.failures, member.books.requests, len(member.streams)) == (0, 0, 0)


BAD = {
    "on_fire": ([whole(b"on fire", 500)], 502, "on fire", 1),
    "hung_up": ([DROP], 502, "hung up", 1),
    "redirect": ([whole(b"", 302)], 502, "302", 1),
    "bad_key": ([whole(b"Bearer upstream-secret is wrong", 401)], 502, "gateway's key", 1),
    "busy": ([whole(b"later", 429).replace(b"\r\n\r\n", b"\r\nRetry-After: 7\r\n\r\n", 1)], 503, "later", 0),
    "garbage": ([b"\x00\x01\r\n\r\n"], 502, "HTTP", 1),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_failure_is_an_error_in_openai_s_shape(worker, name):
    script, status, says, failures = BAD[name]
    worker.script = script
    async with front(worker) as gateway:
        response, got = await gateway.post(chat("a"))
        error = json.loads(got)["error"]
        assert (response.status, error["type"]) == (status, "server_error" if status == 502 else "service_unavailable_error")
        assert says in error["message"]
        assert b"upstream-secret" not in got
        assert response.headers.get("Retry-After") == ("7" if name == "busy" else "1")
        member = gateway.pool.member("worker-0")
        assert (member.breaker.failures, member.books.requests) == (failures, 0)


async def test_another_worker_answers_what_one_fails():
    async with RawWorker("openai", [whole(b"", 500)]) as bad, RawWorker("openai", answer()) as good:
        async with front(bad, good) as gateway:
            for number in range(6):
                response, _ = await gateway.post(chat(f"{number}" * 600))
                assert (response.status, response.headers["X-Turnkeep-Replica"]) == (200, "worker-1")
            assert 1 <= bad.posts <= 3
            assert good.posts == 6


async def test_a_stream_that_breaks_off_says_so(worker):
    worker.script = [head(200, "text/event-stream"), piece(b'data: {"a":1}\n\ndata: {"b'), DROP]
    async with front(worker) as gateway:
        _, got = await gateway.post(chat("a", stream=True))
        begun, _, error = got.partition(b'data: {"b\n\n')
        assert begun == b'data: {"a":1}\n\n'
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
        assert gateway.pool.member("worker-0").breaker.failures == 1


@pytest.mark.parametrize("framing", [[head(), piece(b'{"a":')], [head(length=500), b'{"a":']])
async def test_a_body_that_breaks_off_breaks_off_for_the_client(worker, framing):
    worker.script = [*framing, DROP]
    async with front(worker) as gateway:
        with pytest.raises(aiohttp.ClientError):
            await gateway.post(chat("a"))
        await until(lambda: gateway.pool.member("worker-0").breaker.failures == 1)
        assert gateway.pool.member("worker-0").books.requests == 0


async def test_an_endless_stream_is_cut(worker):
    def pieces():
        while True:
            yield piece(b'data: {"choices":[]}\n\n' * 20)

    worker.script = [head(200, "text/event-stream"), pieces]
    async with front(worker) as gateway:
        async with asyncio.timeout(20):
            _, got = await gateway.post(chat("a", stream=True, max_tokens=10))
        assert b"more than the 10 tokens" in got
        assert len(got) < 100_000
        async with asyncio.timeout(5):
            await worker.left.wait()


async def test_a_200_with_an_error_counts_as_a_failure(worker):
    worker.script = [whole(b'{"error":{"message":"on fire"}}')]
    async with front(worker) as gateway:
        for _ in range(3):
            _, got = await gateway.post(chat("a"))
            assert got == b'{"error":{"message":"on fire"}}'
        response, _ = await gateway.post(chat("a"))
        assert (response.status, worker.posts) == (503, 3)


async def test_a_client_that_leaves_ends_it(worker):
    worker.script = [head(200, "text/event-stream"), piece(b"data: 1\n\n"), HANG]
    async with front(worker) as gateway:
        async with gateway.http.post(gateway.running.url + "/v1/chat/completions", json=chat("a", stream=True)) as response:
            await response.content.readany()
            response.close()
        async with asyncio.timeout(5):
            await worker.left.wait()
        await until(lambda: gateway.pool.member("worker-0").books.requests == 0)


async def test_models_are_those_of_the_workers(worker):
    worker.adapters = ["other"]
    async with front(worker) as gateway:
        _, listed = await gateway.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["m", "other"]
        assert (await gateway.get("/v1/models/other"))[1]["id"] == "other"
        response, got = await gateway.post({**chat("a"), "model": "gpt-9"})
        assert response.status == 404
        assert "Models are: 'm', 'other'." in json.loads(got)["error"]["message"]
        response, got = await gateway.post({"messages": []})
        assert (response.status, json.loads(got)["error"]["param"]) == (400, "model")
        assert (await gateway.get("/ready"))[0] == 200
        worker.script = [whole(b'{"data":[]}')]
        response, got = await gateway.post({"model": "other", "input": "x"}, path="/v1/embeddings")
        assert (response.status, got, worker.heads[-1].split()[1]) == (200, b'{"data":[]}', "/v1/embeddings")
        worker.model, worker.adapters = "new", []
        gateway.pool.member("worker-0").client._asked = None
        await until(lambda: gateway.pool.opaque_models() == ("new",))


async def test_turns_go_where_their_text_is():
    async with RawWorker("openai", answer()) as one, RawWorker("openai", answer()) as two, front(one, two) as gateway:
        texts = [[f"{number}" * 3000] for number in range(4)]
        homes = []
        for text in texts:
            response, _ = await gateway.post(chat(*text))
            homes.append(response.headers["X-Turnkeep-Replica"])
        assert set(homes) == {"worker-0", "worker-1"}
        await until(lambda: gateway.index.blocks("worker-0") and gateway.index.blocks("worker-1"))
        for text, home in zip(texts, homes, strict=True):
            response, _ = await gateway.post(chat(*text, "more"))
            assert response.headers["X-Turnkeep-Replica"] == home
        member = gateway.pool.member(homes[0])
        assert member.client.memory.contradictions == 0


async def test_what_the_worker_says_of_its_cache_is_believed(worker):
    worker.script = answer(cached=0)
    async with front(worker) as gateway:
        await gateway.post(chat("a" * 5000))
        await gateway.post(chat("b" * 5000))
        await until(lambda: gateway.index.blocks("worker-0") > 30)
        memory = gateway.pool.member("worker-0").client.memory
        before = len(memory)
        await gateway.post(chat("a" * 5000))  # again, and it says that nothing was cached
        assert memory.contradictions == 1
        assert len(memory) < before + 1
        worker.script = answer(cached=98)
        await gateway.post(chat("a" * 5000))
        assert memory.contradictions == 1


def digests(text):
    return chunk_digests(text, ROOT)


def test_memory_gives_up_the_oldest_and_what_is_denied():
    memory = ChunkMemory("life", max_chunks=8)
    a, b = digests(b"a" * 1024), digests(b"b" * 1024)
    assert (len(a), len(b)) == (4, 4)
    memory.answered(a, ROOT, None)
    memory.answered(b, ROOT, 0.0)
    assert memory.held() == b"".join([*reversed(a), *reversed(b)])
    memory.answered(digests(b"c" * 512), ROOT, 0.0)
    assert len(memory) == 8
    assert a[2] not in [memory.held()[at : at + 16] for at in range(0, 128, 16)]
    long = ChunkMemory("life")
    text, later = digests(b"x" * 256 * 20), digests(b"y" * 256 * 20)
    long.answered(text, ROOT, None)
    long.answered(later, ROOT, None)
    long.answered(later, ROOT, 0.9)  # a block or two less is no contradiction
    assert (len(long), long.contradictions) == (40, 0)
    long.answered(text, ROOT, 0.0)
    assert (len(long), long.contradictions) == (40, 1)
    long.answered(later, ROOT, 0.0)  # used before x was: x stays
    assert (len(long), long.contradictions) == (40, 2)


def test_texts_that_grow_begin_alike():
    short, grown = chat("a" * 2000, tools=[{"x": 1}]), chat("a" * 2000, "b", tools=[{"x": 1}])
    assert prompt_text(grown).startswith(prompt_text(short))
    assert digests(prompt_text(grown))[:7] == digests(prompt_text(short))[:7]
    assert prompt_text({"prompt": "abc"}) == b"abc"
    assert len(digests(b"x" * 9 * 2**20)) == 4 * 2**20 // 256
    assert prompt_text({"messages": "nonsense", "prompt": None}) == b""
    assert (answer_limit({"max_tokens": 5, "n": 2}), answer_limit({"max_tokens": "x"}), answer_limit({})) == (10, None, None)


@pytest.mark.parametrize("cut", [1, 3, 10_000])
def test_reading_along_changes_nothing_and_finds_the_usage(cut):
    long = b'data: {"x":"' + b"y" * 1_200_000 + b'"}\n\n'
    text = long + b'data: {"usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":5}}}\n\ndata: [DONE]\n\n'
    text = text if cut > 100 else text[len(long) :]
    reader = AnswerReader(stream=True)
    for at in range(0, len(text), cut):
        reader.feed(text[at : at + cut])
        assert len(reader._held) <= 2**20
    reader.end()
    assert reader.usage.cached_share == 0.5
    assert reader.at_event_end
    assert not reader.failed
