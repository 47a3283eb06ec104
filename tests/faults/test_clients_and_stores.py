"""What clients, Redis, clocks and the gateway's own death do to streams, with the values that hold nevertheless."""

import asyncio
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from cluster import Cluster, dice, replicas_at, simulated
from live_gateway import serve
from redis_server import redis_server
from streams import ask, ask_all, plain_ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS = 6
CONNECTIONS = 10_000
SKEWED = Path(__file__).parent / "skewed"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Stage:
    """Two replicas, Redis, and a gateway on a fixed port that may be killed and started again."""

    def __init__(self, replicas, redis, model, session):
        self.replicas, self.redis, self.model, self.session = replicas, redis, model, session
        self.port = free_port()
        self.gateway = ExitStack()
        self.made = None
        throws = dice(9)
        self.bodies = [plain_ask(number, throws, 80) for number in range(STREAMS)]

    async def open(self, env=None):
        workers = [option for replica in self.replicas for option in ("--worker", replica.url)]
        options = ("--port", self.port, "--redis", self.redis.url, "--http-write-timeout", 2, "--pool-poll-interval", 0.2)
        served = serve("--model", self.model, "--served-model-name", "m", *workers, *options, env=env)
        self.made = Cluster(self.replicas, self.gateway.enter_context(served))
        await self.made.workers_up(2)

    def kill_gateway(self):
        self.made.served.process.kill()
        self.gateway.close()

    async def everything(self):
        return [answer.said() for answer in await ask_all(self.session, self.made.url, self.bodies, STREAMS)]

    async def begin(self):
        """Streams that have all said something."""
        said, began = set(), asyncio.Event()

        def note(answer):
            said.add(id(answer))
            if len(said) == STREAMS:
                began.set()

        streams = [asyncio.create_task(ask(self.session, self.made.url, body, on_event=note)) for body in self.bodies]
        async with asyncio.timeout(60):
            await began.wait()
        return streams

    async def converse(self, name, turns, messages):
        """More turns of a session; returns cached tokens of each."""
        cached = []
        for _ in range(turns):
            messages.append({"role": "user", "content": "Tell me more about it. " * 8})
            body = {"model": "m", "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            async with self.session.post(
                self.made.url + "/v1/chat/completions", json=body, headers={"Session-ID": name}
            ) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages.append(answer["choices"][0]["message"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return cached


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(smollm2_dir, tmp_path_factory):
    arguments = [simulated(smollm2_dir, step=0.02)] * 2
    with redis_server() as redis:
        async with (
            replicas_at(tmp_path_factory.mktemp("stage"), arguments) as replicas,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), read_bufsize=2**20) as session,
        ):
            made = Stage(replicas, redis, smollm2_dir, session)
            with made.gateway:
                await made.open()
                made.expected = await made.everything()
                yield made


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_is_left(stage):
    yield
    await stage.made.nothing_is_left()


async def test_redis_is_killed_under_streams(stage):
    messages = []
    cached = await stage.converse("s", 2, messages)
    assert cached[1] > 0
    streams = await stage.begin()
    stage.redis.kill()
    assert [answer.said() for answer in await asyncio.gather(*streams)] == stage.expected
    # Sessions go on from this process's own memory.
    assert (await stage.converse("s", 2, messages))[-1] > cached[1]

    async def down():
        return await stage.made.metric("redis_up") == 0

    await stage.made.until(down)
    stage.redis.start()

    async def up():
        await stage.converse("other", 1, [])
        return await stage.made.metric("redis_up") == 1

    await stage.made.until(up)
    assert (await stage.converse("s", 1, messages))[0] > cached[1]


def narrow(address):
    """A socket that takes little at a time, so that a slow reader is slow for the gateway too."""
    connection = socket.socket(*address[:3])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


async def test_a_slow_reader_gets_all_and_one_that_reads_nothing_is_left(stage):
    long = {"model": "m", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 2000, "n": 64}
    long |= {"temperature": 1.0, "seed": 4, "ignore_eos": True, "stream": True}
    aborted = sum([(await replica.stats()).aborted_total for replica in stage.replicas])
    before = (await stage.made.metrics())["process_resident_memory_bytes"]
    connector = aiohttp.TCPConnector(socket_factory=narrow)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1024) as narrow_session:
        slow = asyncio.create_task(ask(narrow_session, stage.made.url, stage.bodies[1], pace=0.02))
        async with narrow_session.post(stage.made.url + "/v1/chat/completions", json=long) as deaf:
            assert deaf.status == 200
            # Others do not notice either of them.
            assert await stage.everything() == stage.expected

            async def given_up():
                return sum([(await replica.stats()).aborted_total for replica in stage.replicas]) > aborted

            await stage.made.until(given_up)
            assert (await stage.made.metrics())["process_resident_memory_bytes"] - before < 150e6
        assert (await slow).said() == stage.expected[1]


async def test_ten_thousand_idle_connections(stage):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CONNECTIONS + 1000:
        pytest.skip(f"this machine allows a process fewer than {CONNECTIONS + 1000} open files (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    before = (await stage.made.metrics())["process_resident_memory_bytes"]
    idle = []
    try:
        await asyncio.to_thread(_connect, stage.port, CONNECTIONS, idle)
        assert len(idle) == CONNECTIONS
        assert await stage.everything() == stage.expected
        async with stage.session.get(stage.made.url + "/health") as response:
            assert response.status == 200
        grown = (await stage.made.metrics())["process_resident_memory_bytes"] - before
        assert grown < 300e6, f"{CONNECTIONS} idle connections take {grown / 1e6:.0f} MB"
    finally:
        for connection in idle:
            connection.close()


async def test_the_gateway_is_killed_and_its_successor_has_a_wrong_clock(stage):
    messages = []
    cached = await stage.converse("long", 3, messages)
    streams = await stage.begin()
    stage.kill_gateway()
    for outcome in await asyncio.gather(*streams, return_exceptions=True):
        # No stream that was cut looks like a whole one.
        assert isinstance(outcome, aiohttp.ClientError | AssertionError), outcome
    for replica in stage.replicas:
        assert (await replica.idle()).running == 0
    assert sum([(await replica.stats()).aborted_total for replica in stage.replicas]) >= STREAMS
    began = time.monotonic()
    await stage.open(env={"PYTHONPATH": str(SKEWED)})
    print(f"a gateway was whole again {time.monotonic() - began:.1f} s after it was started anew")
    # The session comes back from Redis, the index from the workers, and yesterday's clock decides nothing.
    (found,) = await stage.converse("long", 1, messages)
    assert found > cached[-1]
    assert await stage.everything() == stage.expected
    values = await stage.made.metrics()
    durations = {key: value for key, value in values.items() if "request_duration_seconds_sum" in key}
    assert durations
    assert all(0 < value < 1000 for value in durations.values()), durations


def _connect(port, count, made):
    for _ in range(count):
        connection = socket.socket()
        made.append(connection)
        connection.connect(("127.0.0.1", port))
