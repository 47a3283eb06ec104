"""Clients that leave, stall or send half: whatever they do, the engine drops their request and every block comes back."""

import asyncio
import contextlib
import json
import socket

import msgspec
import pytest
from replica_harness import FAST, Gated, running, simulated, tokens_of

from engine.server.listen import UnixAddress


def body(request_id="r", prompt=range(10, 50), **sampling):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling}


def http(payload, length=None, content_type="application/json", extra=""):
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    head = f"POST /v1/generate HTTP/1.1\r\nHost: replica\r\nContent-Type: {content_type}\r\n{extra}"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connection(url, receive_buffer=None):
    """A bare connection: `url` is http://host:port or the path of a unix socket."""
    if url.startswith("http"):
        host, port = url.removeprefix("http://").split(":")
        connecting = socket.socket()
        if receive_buffer is not None:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, (host, int(port)))
    else:
        connecting = socket.socket(socket.AF_UNIX)
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, url)
    reader, writer = await asyncio.open_connection(sock=connecting, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer_of(reader):
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return int(head.split()[1]), msgspec.json.decode(await reader.readexactly(length))["error"]


async def still_serves(replica):
    assert (await replica.get("/health"))[0] == 200
    assert len(tokens_of(await replica.generate(body("after")))) == 8
    return await replica.idle()


@pytest.mark.parametrize("leave", ["close", "reset", "half-close"])
@pytest.mark.parametrize("choices", [1, 3])
async def test_leaving_while_decoding(load, leave, choices):
    async with running(load) as replica:
        async with connection(replica.url) as (_, writer):
            writer.write(http(body(n=choices, max_tokens=3000, temperature=1.0)))
            await replica.until(lambda stats: stats.generated_tokens_total > 2 * choices)
            if leave == "half-close":
                writer.write_eof()
                await replica.until(lambda stats: stats.aborted_total == 1)
            elif leave == "reset":
                writer.transport.abort()
        stats = await replica.until(lambda stats: stats.aborted_total == 1)
        assert stats.generated_tokens_total < 3000
        await still_serves(replica)


@pytest.mark.parametrize("choices", [1, 2])
async def test_leaving_while_prefilling(load, choices):
    """The prompt takes many steps; the reader goes after three of them."""

    def gated():
        return Gated(load())

    async with running(gated) as replica:
        budget = 256
        async with connection(replica.url) as (_, writer):
            writer.write(http(body(prompt=[10 + position % 300 for position in range(3900)], max_tokens=50, n=choices)))
            replica.core.allow(3)
            middle = await replica.until(lambda stats: stats.steps_total == 3)
            assert middle.running == 1
            assert middle.num_blocks - middle.free_blocks - middle.cached_blocks >= 3 * budget // 16
        assert (await replica.get("/health"))[0] == 200  # the loop has seen the connection end
        replica.core.allow(8)
        stats = await replica.until(lambda stats: stats.aborted_total == 1)
        replica.core.open()
        assert stats.steps_total <= 11
        assert stats.generated_tokens_total == 0
        assert (await still_serves(replica)).generated_tokens_total == 8


async def test_leaving_while_queued_lets_the_others_pass():
    async with running(lambda: simulated(max_num_seqs=1)) as replica:
        async with connection(replica.url) as (_, first):
            first.write(http(body("first", max_tokens=3000)))
            await replica.until(lambda stats: stats.running == 1)
            async with connection(replica.url) as (_, second):
                second.write(http(body("second", range(300, 400))))
                # Counted by the engine: one that is still being checked waits too, but the engine has not heard of it.
                waiting = await replica.until(lambda stats: stats.waiting == 1 and stats.requests_total == 2)
                assert waiting.waiting_prompt_tokens == 100
            stats = await replica.until(lambda stats: stats.aborted_total == 1 and not stats.waiting)
            assert stats.running == 1
        assert (await still_serves(replica)).aborted_total == 2


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_a_reader_that_reads_nothing_is_disconnected(transport, tmp_path):
    """A thousand token lines a step outgrow every socket buffer; what waits is merged, so memory does not follow."""
    address = None if transport == "tcp" else UnixAddress(tmp_path / "replica.sock")
    load = lambda: simulated(  # noqa: E731
        num_blocks=40_000, max_model_len=600_000, max_num_seqs=64, max_num_batched_tokens=64, cost=FAST, time_scale=0.0
    )
    async with running(load, address, write_timeout=1.0, debug_integrity=False) as replica:
        url = replica.url if transport == "tcp" else str(tmp_path / "replica.sock")
        async with connection(url, receive_buffer=4096) as (_, writer):
            writer.write(http(body(max_tokens=500_000, n=64, temperature=1.0)))
            writer.transport.pause_reading()
            stats = await replica.until(lambda stats: stats.aborted_total == 1, seconds=30)
            assert 0 < stats.generated_tokens_total < 64 * 500_000
        replica.core.check_integrity()
        assert (await replica.stats()).running == 0
        assert len(tokens_of(await replica.generate(body("after")))) == 8


async def test_half_a_body_and_then_silence(load):
    async with running(load, body_timeout=0.3) as replica:
        async with connection(replica.url) as (reader, writer):
            writer.write(http(body(), length=5000))
            status, error = await answer_of(reader)
            assert (status, error["code"]) == (408, "body_timeout")
            assert "0.3 seconds" in error["message"]
        assert (await still_serves(replica)).requests_total == 1


async def test_half_a_body_and_then_gone(load):
    async with running(load) as replica:
        async with connection(replica.url) as (_, writer):
            writer.write(http(body(), length=5000))
            await writer.drain()
            await replica.get("/health")
        assert (await still_serves(replica)).requests_total == 1


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (http(b"no gzip", extra="Content-Encoding: gzip\r\n"), 400, "malformed_body"),
        (http(b"\x82\xaarequest_id", content_type="application/msgpack"), 400, "malformed_body"),
        (http(b"{}", length=10**12), 413, "body_too_large"),
    ],
)
async def test_bodies_that_do_not_fit_their_headers(data, status, code):
    async with running(simulated) as replica:
        async with connection(replica.url) as (reader, writer):
            writer.write(data)
            answered, error = await answer_of(reader)
            assert (answered, error["code"]) == (status, code)
        await still_serves(replica)


@pytest.mark.parametrize("data", [b"\x00\x01\x02\r\n\r\n", http(b"", extra="Transfer-Encoding: chunked\r\n"), b"GET"])
async def test_what_is_no_http_ends_only_its_own_connection(data):
    async with running(simulated) as replica:
        async with connection(replica.url) as (_, writer):
            writer.write(data)
            await writer.drain()
            await still_serves(replica)


async def test_a_storm_of_leavers_loses_no_block(load):
    async with running(load) as replica:

        async def client(number):
            async with connection(replica.url) as (reader, writer):
                writer.write(http(body(f"r{number}", range(number % 7, number % 7 + 90), n=1 + number % 2, max_tokens=400)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.005 * (number % 20)):
                        await reader.read()

        await asyncio.gather(*(client(number) for number in range(100)))
        await still_serves(replica)
