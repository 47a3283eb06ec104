"""A replica behind real sockets, in the test's own event loop."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import aiohttp
import msgspec

from engine.server.config import ServerConfig
from engine.server.listen import TCPAddress
from engine.server.run import serve
from engine.simulate import SimulatedEngine
from engine.simulation.config import CostModel, SimulationConfig
from engine.thread import EngineThreadConfig
from gateway.workers.protocol import Chunk, Tokens, WorkerStats
from prefix_cache.events import KVMessage

FAST = CostModel(step=0.002, prefill_token=1e-6, prefill_pair=0.0, decode_sequence=0.0, decode_context_token=0.0)


def simulated(**changes):
    config = {"num_blocks": 256, "max_model_len": 4096, "max_num_seqs": 32, "mean_output_tokens": 0, "cost": FAST}
    return SimulatedEngine(SimulationConfig(**{**config, **changes}))


class Gated:
    """A core whose steps need a permit each, so that a test says how far it gets."""

    def __init__(self, core, permits=0):
        self._core = core
        self._permits = threading.Semaphore(permits)
        self._opened = False

    def __getattr__(self, name):
        return getattr(self._core, name)

    def allow(self, steps):
        self._permits.release(steps)

    def open(self):
        """From now on steps need none."""
        self._opened = True
        self._permits.release()

    def step(self):
        before = self._core.stats().steps_total
        if not self._opened:
            self._permits.acquire()
        produced = self._core.step()
        if self._core.stats().steps_total == before:
            self._permits.release()  # it was interrupted while it waited for its time to pass
        return produced


@dataclass
class Replica:
    url: str
    session: aiohttp.ClientSession
    core: object
    task: asyncio.Task

    async def get(self, path, **kwargs):
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.read()

    async def post(self, path, body, content_type="application/json", **kwargs):
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Content-Type": content_type, **kwargs.pop("headers", {})}
        async with self.session.post(self.url + path, data=data, headers=headers, **kwargs) as response:
            return response.status, await response.read()

    async def generate(self, body, **kwargs):
        """All chunks of an accepted request."""
        status, answer = await self.post("/v1/generate", body, **kwargs)
        assert status == 200, answer
        return decode_chunks(answer)

    async def refused(self, body, **kwargs):
        status, answer = await self.post("/v1/generate", body, **kwargs)
        return status, msgspec.json.decode(answer)["error"]

    async def stats(self):
        return msgspec.json.decode((await self.get("/v1/stats"))[1], type=WorkerStats)

    async def until(self, condition, seconds=20):
        """The stats, once `condition` holds of them."""
        async with asyncio.timeout(seconds):
            while True:
                stats = await self.stats()
                if condition(stats):
                    return stats
                await asyncio.sleep(0.005)

    async def idle(self, seconds=20):
        """Waits until nothing runs; every block is free or cached then, and the books balance."""
        stats = await self.until(lambda stats: not stats.running and not stats.waiting, seconds)
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        self.core.check_integrity()
        return stats


def decode_chunks(lines):
    return [msgspec.json.decode(line, type=Chunk) for line in lines.splitlines()]


def decode_message(line):
    return msgspec.json.decode(line, type=KVMessage)


def tokens_of(chunks, index=0):
    return [token for chunk in chunks if isinstance(chunk, Tokens) and chunk.index == index for token in chunk.token_ids]


@contextlib.asynccontextmanager
async def running(
    load, address=None, *, otlp_url=None, max_requests=1024, debug_integrity=True, event_batches=10_000, **config
):
    """Serves what `load` makes until the block ends. `config`: fields of ServerConfig."""
    ready = asyncio.get_running_loop().create_future()
    made = []

    def make():
        made.append(load())
        return made[0]

    config = ServerConfig(**{"heartbeat": 0.2, "shutdown_timeout": 5.0, **config})
    thread_config = EngineThreadConfig(max_requests=max_requests, debug_integrity=debug_integrity, event_batches=event_batches)
    address = TCPAddress("127.0.0.1", 0) if address is None else address
    task = asyncio.create_task(serve(make, address, config, thread_config, otlp_url=otlp_url, on_ready=ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    url = ready.result().address
    connector = (
        aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0) if url.startswith("unix:") else aiohttp.TCPConnector(limit=0)
    )
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Replica("http://replica" if url.startswith("unix:") else url, session, made[0], task)
    if task.done():
        task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
