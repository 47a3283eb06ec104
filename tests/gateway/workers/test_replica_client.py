import asyncio
import os

import msgspec
import pytest
from aiohttp import web
from fake_replica import DROP, HANG, FakeReplica, Wait, answer, refusal, until

from gateway.workers.base import WorkerRefusedError, WorkerUnavailableError
from gateway.workers.protocol import Done, Failed, Finished, GenerateRequest, Started, TokenLogprob, Tokens
from gateway.workers.replica import ReplicaClient
from prefix_cache.events import BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import pack_tokens


@pytest.fixture
async def replica(tmp_path):
    replica = FakeReplica()
    replica.url = await replica.start(tmp_path / "r.sock")
    yield replica
    await replica.stop()


@pytest.fixture
async def client(replica):
    client = ReplicaClient(replica.url, connect_timeout=1, reply_timeout=1, accept_timeout=1)
    yield client
    await client.aclose()


def request(request_id="r", tokens=(5, 6, 7)):
    return GenerateRequest(request_id=request_id, packed_token_ids=pack_tokens(tokens))


async def collect(stream):
    return [chunk async for chunk in stream]


async def test_a_request_and_its_chunks(replica, client):
    logprob = TokenLogprob(9, -0.5, ((9, -0.5), (3, -1.25)))
    replica.scripts.append(
        [Started(3, 2, 0.5), Tokens((9, 8), 1, (logprob, logprob)), Finished("stop", 1, "x"), Done(3, 2, 2, 0, 0, 0, 1)]
    )
    stream = await client.generate(request(tokens=range(1000)), {"traceparent": "abc"})
    chunks = await collect(stream)
    assert chunks == [
        Started(3, 2, 0.5),
        Tokens((9, 8), 1, (logprob, logprob)),
        Finished("stop", 1, "x"),
        Done(3, 2, 2, 0, 0, 0, 1),
    ]
    await stream.finish()
    (got,) = replica.requests
    assert got.packed_token_ids == pack_tokens(range(1000))
    assert replica.headers[0]["traceparent"] == "abc"
    assert replica.headers[0]["Content-Type"] == "application/msgpack"


async def test_chunks_cut_anywhere_and_blank_lines(replica, client):
    whole = b"\n".join(msgspec.json.encode(chunk) for chunk in answer((1, 2, 3))) + b"\n"
    for size in (1, 7, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        replica.scripts.append([b"\n", *pieces])
        assert await collect(await client.generate(request(), {})) == answer((1, 2, 3))
    replica.scripts.append([whole[:-1]])
    assert await collect(await client.generate(request(), {})) == answer((1, 2, 3))


async def test_a_finished_stream_gives_its_connection_back(replica, client):
    for _ in range(5):
        stream = await client.generate(request(), {})
        await collect(stream)
        await stream.finish()
    assert len(client._exchanges._open) == 0
    assert [connection.used for connection in client._exchanges._idle] == [5]


async def test_closing_reaches_the_replica_at_once(replica, client):
    replica.scripts.append([Started(3, 0, 0), Tokens((1,)), HANG])
    stream = await client.generate(request("gone"), {})
    assert isinstance(await anext(stream), Started)
    stream.close()
    await until(lambda: replica.left == ["gone"])


async def test_closing_wakes_a_task_that_reads(replica, client):
    replica.scripts.append([Started(3, 0, 0), HANG])
    stream = await client.generate(request(), {})
    await anext(stream)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    stream.close()
    with pytest.raises(WorkerUnavailableError):
        async with asyncio.timeout(1):
            await reader


async def test_a_cancelled_read_loses_nothing(replica, client):
    go = asyncio.Event()
    replica.scripts.append([*answer((1, 2))[:1], Wait(go), *answer((1, 2))[1:]])
    stream = await client.generate(request(), {})
    await anext(stream)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(stream)
    go.set()
    assert await collect(stream) == answer((1, 2))[1:]


async def test_a_cancelled_request_is_seen_by_the_replica(replica, client):
    replica.scripts.append([HANG])
    task = asyncio.create_task(client.generate(request("c"), {}))
    await until(lambda: replica.requests)
    task.cancel()
    await until(lambda: replica.left == ["c"])


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([Started(3, 0, 0), DROP], "broke off|ended in the middle"),
        ([Started(3, 0, 0), Tokens((1,))], "ended in the middle"),
        ([Started(3, 0, 0), b'{"type":"tok'], "not of the protocol"),
        ([Started(3, 0, 0), b"garbage\n"], "not of the protocol"),
        ([Started(3, 0, 0), b'{"type":"tokens","token_ids":["x"]}\n'], "not of the protocol"),
        ([Started(3, 0, 0), b"\xff\xfe\n"], "not of the protocol"),
    ],
)
async def test_broken_streams(replica, client, script, said):
    replica.scripts.append(script)
    stream = await client.generate(request(), {})
    assert await anext(stream) == Started(3, 0, 0)
    with pytest.raises(WorkerUnavailableError, match=said) as caught:
        await collect(stream)
    assert caught.value.reached
    stream.close()


async def test_a_line_without_end_is_bounded(replica, client):
    replica.scripts.append([Started(3, 0, 0), *[b"x" * 100_000] * 20])
    stream = await client.generate(request(), {})
    stream._max_line = 2**20
    with pytest.raises(WorkerUnavailableError, match="longer than"):
        await collect(stream)


async def test_failed_ends_a_stream(replica, client):
    replica.scripts.append([Started(3, 0, 0), Failed("engine_error", "It broke.")])
    assert await collect(await client.generate(request(), {})) == [Started(3, 0, 0), Failed("engine_error", "It broke.")]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_refusals_keep_the_sentence_and_the_field(replica, client, status):
    replica.scripts.append(refusal(status, "invalid_sampling", "top_p is out of range.", "sampling.top_p"))
    with pytest.raises(WorkerRefusedError) as caught:
        await client.generate(request(), {})
    assert caught.value.status == status
    assert (caught.value.detail.code, caught.value.detail.field) == ("invalid_sampling", "sampling.top_p")
    assert str(caught.value) == "top_p is out of range."


@pytest.mark.parametrize(
    ("status", "code", "busy"),
    [
        (500, "internal_error", False),
        (502, "x", False),
        (503, "queue_full", True),
        (429, "x", True),
        (503, "engine_failed", False),
        (404, "not_found", False),
        (409, "duplicate_request_id", False),
        (415, "unsupported_media_type", False),
        (302, "x", False),
    ],
)
async def test_answers_for_which_another_worker_may_do_better(replica, client, status, code, busy):
    replica.scripts.append(refusal(status, code, "Not now.", headers={"Retry-After": "7"}))
    with pytest.raises(WorkerUnavailableError, match="Not now") as caught:
        await client.generate(request(), {})
    assert (caught.value.reached, caught.value.busy, caught.value.retry_after) == (True, busy, 7.0)


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "1e9", ""])
async def test_odd_retry_after_counts_as_absent(replica, client, value):
    replica.scripts.append(refusal(503, headers={"Retry-After": value}))
    with pytest.raises(WorkerUnavailableError) as caught:
        await client.generate(request(), {})
    assert caught.value.retry_after is None


async def test_an_error_body_that_is_not_of_the_protocol(tmp_path):
    async def fail(request):
        return web.Response(status=500, text="<html>" + "x" * 5000)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", fail)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    client = ReplicaClient(f"unix:{tmp_path}/s")
    with pytest.raises(WorkerUnavailableError, match=r"status 500: <html>x+$") as caught:
        await client.generate(request(), {})
    assert len(str(caught.value)) < 400
    with pytest.raises(WorkerUnavailableError):
        await client.info()
    await client.aclose()
    await runner.cleanup()


async def test_not_there(tmp_path, unused_port):
    for url in (f"unix:{tmp_path}/none.sock", f"http://127.0.0.1:{unused_port}"):
        client = ReplicaClient(url)
        for call in (client.generate(request(), {}), client.info(), client.healthy(), client.abort("x")):
            with pytest.raises(WorkerUnavailableError) as caught:
                await call
            assert not caught.value.reached
        await client.aclose()


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def test_something_that_speaks_no_http(tmp_path):
    async def talk(reader, writer):
        await reader.read(10)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(talk, tmp_path / "s")
    client = ReplicaClient(f"unix:{tmp_path}/s")
    with pytest.raises(WorkerUnavailableError, match=r"HTTP|hung up") as caught:
        await client.generate(request(), {})
    assert caught.value.reached
    await client.aclose()
    server.close()


async def test_a_worker_that_accepts_nothing_in_time(replica, client):
    hasty = ReplicaClient(client.url, accept_timeout=0.05)
    replica.scripts.append([HANG])
    with pytest.raises(WorkerUnavailableError, match=r"did not accept a request within 0\.05 s") as caught:
        await hasty.generate(request(), {})
    await hasty.aclose()
    assert caught.value.reached


async def test_a_frozen_worker_is_reached_but_silent(replica, client):
    client._reply_timeout = 0.05
    replica.frozen = True
    with pytest.raises(WorkerUnavailableError, match="did not answer /v1/stats") as caught:
        await client.stats()
    assert caught.value.reached
    replica.frozen = False


async def test_a_kept_alive_connection_closed_by_the_worker_is_no_failure(tmp_path):
    replica = FakeReplica()
    await replica.start(tmp_path / "r.sock")
    client = ReplicaClient(f"unix:{tmp_path}/r.sock")
    stream = await client.generate(request(), {})
    await collect(stream)
    await stream.finish()
    await replica.stop()
    os.unlink(tmp_path / "r.sock") if (tmp_path / "r.sock").exists() else None
    successor = FakeReplica()
    await successor.start(tmp_path / "r.sock")
    assert await collect(await client.generate(request(), {})) == answer(prompt=3)
    await client.aclose()
    await successor.stop()


async def test_info_stats_health_abort(replica, client):
    replica.running = 3
    assert (await client.info()).block_size == 4
    assert (await client.stats()).running == 3
    assert await client.healthy() is None
    replica.unhealthy = "Loading the weights."
    assert await client.healthy() == "Loading the weights."
    assert await client.abort("some") is False
    assert replica.aborted == ["some"]


async def test_events_from_a_snapshot_on(replica, client):
    digest = b"d" * 16
    replica.blocks["device"] = [digest]
    events = client.kv_events(None, 0)
    assert await anext(events) == Snapshot("life-1", 0, {"device": digest})
    replica.log.append([BlocksStored(b"e" * 16, digest)])
    assert await anext(events) == EventBatch("life-1", 1, (BlocksStored(b"e" * 16, digest),))
    await events.aclose()
    replica.log.append([BlocksStored(b"f" * 16, digest)])
    events = client.kv_events("life-1", 1)
    assert (await anext(events)).seq == 2
    await events.aclose()
    await until(lambda: not replica.event_subscribers)


@pytest.mark.parametrize("url", ["", "unix:", "ftp://x", "localhost:80", "http://", "http://[::1"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="worker address"):
        ReplicaClient(url)


async def test_after_closing_every_call_says_so(client):
    await client.aclose()
    await client.aclose()
    with pytest.raises(WorkerUnavailableError, match="was removed"):
        await client.info()


async def test_closing_between_two_tries_of_a_request_says_so(tmp_path):
    """The worker drops a kept-alive connection just when the client is closed: the second try has no session any more."""

    async def drop(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n" + b'{"aborted":false}')
        await reader.readuntil(b"\r\n\r\n")
        await client.aclose()
        writer.close()

    server = await asyncio.start_unix_server(drop, tmp_path / "r.sock")
    client = ReplicaClient(f"unix:{tmp_path}/r.sock")
    assert await client.abort("first") is False
    with pytest.raises(WorkerUnavailableError, match="was removed"):
        await client.abort("second")
    server.close()


async def test_a_replica_without_prefixes_in_the_place_of_one_with_them_is_sent_the_whole_prompt(replica, client):
    """Rolled back behind the same address between two looks at it: it refuses a field that it does not know."""

    def turn(count):
        return msgspec.structs.replace(request(tokens=range(count)), session="s", gather=0.1)

    client._takes_prefixes = True
    client._gathers = True
    await collect(await client.generate(turn(1024), {}))
    replica.scripts.append(refusal(400, "invalid_request", "object contains unknown field `prefix`"))
    assert await collect(await client.generate(turn(1033), {})) == answer(prompt=1033)
    assert [len(got.packed_token_ids) // 4 for got in replica.requests] == [1024, 9, 1033]
    assert replica.requests[-1].prefix is None
    assert [got.gather for got in replica.requests] == [0.1, 0.1, 0.0]


async def test_a_replica_that_gathers_no_tokens_is_not_asked_to(replica, client):
    gathering = msgspec.structs.replace(request(), gather=0.1)
    await collect(await client.generate(gathering, {}))
    replica.can_gather = True
    await client.info()
    await collect(await client.generate(gathering, {}))
    replica.scripts.append(refusal(400, "invalid_request", "object contains unknown field `gather`"))
    await collect(await client.generate(gathering, {}))
    replica.scripts.append(refusal(400, "invalid_request", "this is no temperature"))
    with pytest.raises(WorkerRefusedError, match="no temperature"):
        await client.generate(gathering, {})
    assert [got.gather for got in replica.requests] == [0.0, 0.1, 0.1, 0.0, 0.1]
