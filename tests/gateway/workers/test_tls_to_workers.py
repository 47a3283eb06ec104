"""Workers behind TLS, with real certificates: a simulated replica of ours, and a server for the other kinds."""

import asyncio
import contextlib
import ssl
import sys

import pytest
from aiohttp import web
from fake_replica import until

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import Prompt, SessionRef, TurnError
from gateway.workers.base import WorkerUnavailableError
from gateway.workers.clients import open_client
from gateway.workers.exchanges import Exchanges
from gateway.workers.protocol import SamplingParams, Tokens
from gateway.workers.spec import WorkerSpec
from gateway.workers.tls import worker_tls
from gateway.workers.transport import Patience
from prefix_cache.hashing import pack_tokens
from prefix_cache.packed_tokens import PackedTokens
from tests.certificates import Authority, needs_openssl, self_signed

pytestmark = needs_openssl


class TlsFront:
    """Ends TLS in front of a server, byte by byte, as a proxy of an operator would."""

    def __init__(self, certificate, key, connect):
        """connect: gives a reader and a writer to the server behind."""
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._connect = connect
        self._tasks = set()
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        with contextlib.suppress(asyncio.CancelledError):
            behind_reader, behind_writer = await self._connect()
            await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))


async def _copy(reader, writer):
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def replica(tmp_path):
    """Opens connections to a simulated replica."""
    path = tmp_path / "r.sock"
    command = [sys.executable, "-m", "cli.main", "engine", "--simulate", "--model-name", "m", "--sim-time-scale", "0"]
    process = await asyncio.create_subprocess_exec(*command, "--uds", str(path), stdout=asyncio.subprocess.PIPE)
    try:
        assert await process.stdout.readline(), "it did not start"
        yield lambda: asyncio.open_unix_connection(str(path))
    finally:
        process.kill()
        await process.wait()


def pool(ca_file=None):
    return PoolDispatcher(PoolConfig(poll_interval=0.05, ca_file=None if ca_file is None else str(ca_file)))


async def send(dispatcher, number):
    return await dispatcher.dispatch(
        request_id=f"r{number}",
        model="m",
        session=SessionRef("t", "s"),
        prompt=Prompt(PackedTokens(pack_tokens(range(100))), ()),
        sampling=SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        priority=0,
        trace_headers={},
        known_as=None,
    )


async def test_turns_stream_from_a_replica_whose_authority_is_named(authority, replica):
    async with TlsFront(*authority.sign("replica"), replica) as front, pool(authority.ca) as dispatcher:
        dispatcher.add_worker("worker-0", front.url)
        await dispatcher.wait_ready(1, 30)
        await until(lambda: dispatcher.index.position("worker-0") is not None, 30)
        opened = []
        for number in range(3):
            generation = await send(dispatcher, number)
            chunks = [chunk async for chunk in generation.chunks()]
            assert sum(len(chunk.token_ids) for chunk in chunks if isinstance(chunk, Tokens)) == 20
            await generation.aclose()
            opened.append(front.connections)
            # The end of the answer's body comes behind its last chunk.
            await until(lambda: dispatcher.pool.member("worker-0").client._exchanges._idle)
        # A handshake for each turn would cost more than routing it.
        assert opened[0] == opened[2]


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        ("signed", "unable to get local issuer certificate"),
        ("its own", "self-signed certificate"),
    ],
)
async def test_a_certificate_that_nobody_vouches_for_is_named_with_the_remedy(
    authority, replica, tmp_path, caplog, certificate, said
):
    if certificate == "its own":
        self_signed(tmp_path, "replica")
        files = tmp_path / "cert.pem", tmp_path / "key.pem"
    else:
        files = authority.sign("stranger")
    async with TlsFront(*files, replica) as front:
        async with pool() as dispatcher:
            dispatcher.add_worker("worker-0", front.url)
            await until(lambda: "not trusted" in dispatcher.workers()[0].detail, 30)
            (view,) = dispatcher.workers()
            assert view.state == "starting"
            assert [record.message for record in caplog.records if "worker-0" in record.message] == [
                f"worker worker-0 cannot be used yet: {view.detail}"
            ]
            assert view.detail.startswith(f"worker {front.url} cannot be reached: its certificate is not trusted ({said}")
            assert view.detail.endswith("name who signed it with --worker-ca FILE (pool.ca_file)")
            with pytest.raises(TurnError) as refused:
                await send(dispatcher, 0)
            assert (refused.value.status, refused.value.code) == (503, "no_worker")
            assert f"worker-0 is starting (worker {front.url} cannot be reached" in refused.value.message
        exchanges = Exchanges(front.url, Patience(connect=5))
        with pytest.raises(WorkerUnavailableError) as failed:
            await exchanges.post("/v1/generate", b"{}", "application/json", {})
        exchanges.close()
        assert str(failed.value) == view.detail
        assert not failed.value.reached
        if certificate == "its own":
            # Such a certificate is its own authority.
            async with pool(tmp_path / "cert.pem") as dispatcher:
                dispatcher.add_worker("worker-0", front.url)
                await dispatcher.wait_ready(1, 30)


async def test_a_certificate_for_another_name_and_a_port_without_tls(authority, replica):
    tls = worker_tls(str(authority.ca))
    async with TlsFront(*authority.sign("elsewhere", "DNS:elsewhere.example"), replica) as front:
        sentence = await trouble(front.url, tls)
        assert f"worker {front.url} cannot be reached: its certificate is for another name" in sentence
        assert "call it by one that stands in it" in sentence
    plain = await asyncio.start_server(lambda reader, writer: writer.write(b"HTTP/1.1 400 No\r\n\r\n"), "127.0.0.1", 0)
    async with plain:
        url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
        sentence = await trouble(url, tls)
        assert f"worker {url} cannot be reached: it does not speak TLS there" in sentence
        assert sentence.endswith("write http:// instead of https://")


async def trouble(url, tls):
    """What both kinds of connections to a worker say, which is one."""
    said = set()
    client = open_client(WorkerSpec(url), Patience(connect=5), tls)
    with pytest.raises(WorkerUnavailableError) as failed:
        await client.info()
    await client.aclose()
    said.add(str(failed.value))
    exchanges = Exchanges(url, Patience(connect=5), tls)
    with pytest.raises(WorkerUnavailableError) as failed:
        await exchanges.post("/v1/generate", b"{}", "application/json", {})
    exchanges.close()
    said.add(str(failed.value))
    (sentence,) = said
    return sentence


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang", "openai"])
async def test_every_kind_of_worker_is_checked_against_the_same_authorities(authority, kind):
    async def models(request):
        return web.json_response({"data": [{"id": "m"}]})

    async def health(request):
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
    certificate, key = authority.sign(f"a-{kind}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    url = f"https://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        trusting = open_client(WorkerSpec(url, kind), Patience(), worker_tls(str(authority.ca)))
        assert await trusting.healthy() is None
        await trusting.aclose()
        doubting = open_client(WorkerSpec(url, kind), Patience(), worker_tls(None))
        with pytest.raises(WorkerUnavailableError, match="its certificate is not trusted"):
            await doubting.healthy()
        await doubting.aclose()
    finally:
        await runner.cleanup()


def test_authorities_that_cannot_be_read_are_a_sentence(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "absent.pem"):
        with pytest.raises(ValueError, match=r"pool\.ca_file \(--worker-ca\): .* cannot be used: .*; give the certificates"):
            PoolDispatcher(PoolConfig(ca_file=str(path)))
