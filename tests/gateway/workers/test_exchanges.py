"""HTTP/1.1 to a replica, byte for byte, against servers that answer in every way that HTTP allows."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workers import exchanges as module
from gateway.workers.base import WorkerUnavailableError
from gateway.workers.exchange import HIGH_WATER_BYTES, BrokenExchangeError
from gateway.workers.exchanges import Exchanges
from gateway.workers.transport import Patience

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers the requests of each connection with what `answers` says, in order; a function is called with the writer."""

    def __init__(self, *answers):
        self.answers, self.requests, self.connections, self.lost = list(answers), [], 0, asyncio.Event()
        self.asked = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.exchanges = Exchanges(self.url, Patience(connect=1, reply=1, accept=1))
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc):
        self.exchanges.close()
        self.server.close()

    async def post(self, body=b"{}", **headers):
        return await self.exchanges.post("/v1/generate", body, "application/msgpack", headers)

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                answer = self.answers.pop(0)
                if callable(answer):
                    await answer(writer)
                elif answer is None:
                    break
                else:
                    writer.write(answer)
            else:
                await reader.read()
        self.lost.set()
        writer.close()


async def read_all(connection):
    pieces = []
    while piece := await connection.read():
        pieces.append(piece)
    return b"".join(pieces)


async def test_the_request_as_it_goes_out_and_one_connection_for_all():
    async with Server(OK, OK, OK) as server:
        for _ in range(3):
            connection = await server.post(b"\x00body", traceparent="00-1-2-01")
            assert connection.status == 200
            assert await read_all(connection) == b"ok"
        assert server.connections == 1
        port = server.url.rpartition(":")[2]
        expected = (
            f"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/msgpack\r\n"
            "Content-Length: 5\r\ntraceparent: 00-1-2-01\r\n\r\n\x00body"
        )
        assert server.requests == [expected.encode()] * 3


async def test_a_header_that_would_be_two_is_never_sent():
    async with Server(OK) as server:
        with pytest.raises(ValueError, match="tracestate"):
            await server.post(tracestate="a\r\nX: y")
        assert server.requests == []


async def test_interim_answers_are_passed_over():
    async with Server(b"HTTP/1.1 100 Continue\r\n\r\n" + OK) as server:
        connection = await server.post()
        assert (connection.status, await read_all(connection)) == (200, b"ok")


async def test_a_body_that_ends_with_its_connection():
    async def answer(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nsome ")
        await writer.drain()
        writer.write(b"more")
        writer.close()

    async with Server(answer, OK) as server:
        connection = await server.post()
        assert await read_all(connection) == b"some more"
        assert not connection.usable
        assert await read_all(await server.post()) == b"ok"
        assert server.connections == 2


async def test_connection_close_is_obeyed():
    async with Server(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), OK) as server:
        first = await server.post()
        assert await read_all(first) == b"ok"
        second = await server.post()
        assert await read_all(second) == b"ok"
        assert second is not first


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", b"HTTP/1.1 200 OK\r\nContent-Len"])
async def test_what_breaks_off_is_an_error_after_what_came(answer):
    async def broken(writer):
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with Server(broken) as server:
        if b"\r\n\r\n" not in answer:
            with pytest.raises(WorkerUnavailableError, match="hung up") as caught:
                await server.post()
            assert caught.value.reached
            return
        connection = await server.post()
        await asyncio.wait_for(server.lost.wait(), 5)
        assert await connection.read() == b"ok"
        with pytest.raises(BrokenExchangeError):
            await connection.read()


async def test_who_speaks_unasked_is_not_asked_again():
    async with Server(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK) as server:
        first = await server.post()
        # What came behind the answer belongs to nobody: neither to this request nor to the next.
        assert (await read_all(first)).startswith(b"ok")
        second = await server.post()
        assert await read_all(second) == b"ok"


async def test_a_connection_that_was_closed_meanwhile_is_not_blamed_on_the_worker():
    async def answer(writer):
        writer.write(OK)
        await writer.drain()
        server.answers.append(None)  # hangs up when the next request comes on this connection
        server.answers.append(OK)

    async with Server(answer) as server:
        await read_all(await server.post())
        assert await read_all(await server.post()) == b"ok"
        assert (server.connections, len(server.requests)) == (2, 3)


async def test_a_new_connection_that_is_closed_is():
    async with Server(None) as server:
        with pytest.raises(WorkerUnavailableError, match="hung up") as caught:
            await server.post()
        assert caught.value.reached
        assert server.connections == 1


async def test_a_reader_who_does_not_read_stops_the_writer():
    written = 0
    stuck = asyncio.Event()

    async def answer(writer):
        nonlocal written
        total = 16 * 2**20
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while written < total:
            writer.write(b"x" * 2**16)
            written += 2**16
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                stuck.set()
                await writer.drain()

    async with Server(answer) as server:
        connection = await server.post()
        await asyncio.wait_for(stuck.wait(), 30)
        assert written < 16 * 2**20
        assert connection._buffered < HIGH_WATER_BYTES + 2**20
        assert len(await read_all(connection)) == 16 * 2**20


async def test_too_late_leaves_nothing_behind():
    async def never(writer):
        await asyncio.sleep(60)

    async with Server(never) as server:
        server.exchanges._patience = Patience(connect=1, reply=1, accept=0.05)
        with pytest.raises(WorkerUnavailableError, match=r"did not accept a request within 0\.05 s"):
            await server.post()
        assert (len(server.exchanges._open), len(server.exchanges._idle)) == (0, 0)


async def test_a_cancelled_request_drops_its_connection():
    async with Server(lambda writer: asyncio.Event().wait()) as server:
        task = asyncio.create_task(server.post())
        await asyncio.wait_for(server.asked.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.exchanges._open) == 0


async def test_idle_connections_are_closed_after_a_while(monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    async with Server(OK, OK) as server:
        await read_all(await server.post())
        assert len(server.exchanges._idle) == 1
        await asyncio.wait_for(server.lost.wait(), 5)
        assert len(server.exchanges._idle) == 0
        assert server.exchanges._sweeping is None or not server.exchanges._sweeping.cancelled()


async def test_closing_ends_what_runs():
    async with Server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok") as server:
        connection = await server.post()
        assert await connection.read() == b"ok"
        server.exchanges.close()
        with pytest.raises(BrokenExchangeError):
            await connection.read()
        with pytest.raises(WorkerUnavailableError, match="was removed"):
            await server.post()


@settings(max_examples=30, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(1, 30), max_size=40),
    chunked=st.booleans(),
)
def test_any_body_cut_anywhere(pieces, cuts, chunked):
    """What is read is what was sent, and the connection can be used again."""
    body = b"".join(pieces)
    if chunked:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        text = head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    else:
        text = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def answer(writer):
        rest = text
        for cut in cuts:
            writer.write(rest[:cut])
            await asyncio.sleep(0)
            rest = rest[cut:]
        writer.write(rest)

    async def scenario():
        async with Server(answer, OK) as server:
            assert await read_all(await server.post()) == body
            assert await read_all(await server.post()) == b"ok"
            assert server.connections == 1

    asyncio.run(scenario())
