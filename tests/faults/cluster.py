"""Replicas and a gateway in processes of their own, to be killed, frozen, stopped and started again while clients go on."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys

import aiohttp
import msgspec
from live_gateway import serve

from gateway.supervision import launch
from gateway.workers.protocol import WorkerStats

START_SECONDS = 250
"""For a replica to load; on a machine that has other things to do it takes minutes."""


class ReplicaProcess:
    """`turnkeep engine` at a fixed unix socket; whenever it is started it is a new life under the old address."""

    def __init__(self, name, socket, arguments):
        self.name = name
        self.socket = socket
        self.arguments = arguments
        self.process = None
        self.instance = None
        self.lives = 0

    @property
    def url(self):
        return f"unix:{self.socket}"

    async def start(self):
        """Returns when it can generate. Dies with this process, however that ends."""
        log = self.socket.with_suffix(".log")
        command = [sys.executable, "-P", "-m", "cli.main", "engine", "--uds", str(self.socket), *map(str, self.arguments)]
        with log.open("ab") as said:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "-", *command),
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
                stdin=asyncio.subprocess.DEVNULL,
            )
        async with asyncio.timeout(START_SECONDS):
            line = await self.process.stdout.readline()
        assert line, f"{self.name} ended with status {await self.process.wait()}: {log.read_text()[-2000:]}"
        self.instance = json.loads(line)["instance"]
        self.lives += 1

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def kill(self):
        self.signal(signal.SIGKILL)
        return await self.process.wait()

    async def close(self):
        if self.process is not None and self.process.returncode is None:
            self.signal(signal.SIGCONT)
            await self.kill()

    async def stats(self):
        """What it says of itself, past any gateway."""
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session:
            async with session.get("http://replica/v1/stats") as response:
                assert response.status == 200
                return msgspec.json.decode(await response.read(), type=WorkerStats)

    async def idle(self, seconds=30):
        """The stats, once nothing runs: every block is free or cached then. `--debug-integrity` has the replica prove its books
        whenever it becomes idle, and end when they do not balance."""
        async with asyncio.timeout(seconds):
            while (stats := await self.stats()).running or stats.waiting:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        assert self.process.returncode is None, f"{self.name} ended with status {self.process.returncode}"
        return stats


class Cluster:
    """Some replicas behind one gateway."""

    def __init__(self, replicas, served):
        self.replicas = replicas
        self.served = served
        self.kills = 0

    @property
    def url(self):
        return self.served.url

    async def metrics(self):
        """name{labels} -> value, of the gateway."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    async def metric(self, name):
        """The sum over all labels."""
        values = await self.metrics()
        return sum(value for key, value in values.items() if key.split("{")[0] == f"turnkeep_gateway_{name}")

    async def until(self, condition, seconds=60):
        """Waits for an asynchronous condition."""
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.05)

    async def workers_up(self, count):
        async def up():
            return await self.metric("worker_up") == count

        await self.until(up, START_SECONDS)

    async def kill_at_random(self, kills, pause, dice, done, spared):
        """Kills workers at work one after the other, each started again at once, until there were enough or `done` is set. At
        least `spared` are up at any time: with nobody there, new requests are turned away at once, as they should be."""
        restarts = []
        while self.kills < kills and not done.is_set():
            alive = [replica for replica in self.replicas if replica.process.returncode is None and replica.instance]
            victim = dice.choice(alive) if len(alive) > spared else None
            if victim is None or not (await victim.stats()).running:
                await asyncio.sleep(0.05)
                continue
            victim.instance = None
            await victim.kill()
            self.kills += 1
            restarts.append(asyncio.create_task(victim.start()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * dice.uniform(0.5, 1.5)):
                    await done.wait()
        await asyncio.gather(*restarts)

    async def nothing_is_left(self):
        """Nobody holds anything any more: not the gateway, not a replica."""

        async def empty():
            return not await self.metric("turns_in_flight") and not await self.metric("worker_in_flight")

        await self.until(empty, 30)
        for replica in self.replicas:
            await replica.idle()


@contextlib.asynccontextmanager
async def replicas_at(directory, arguments):
    """One replica for each list of arguments, started together."""
    made = [ReplicaProcess(f"worker-{number}", directory / f"r{number}.sock", one) for number, one in enumerate(arguments)]
    try:
        async with asyncio.TaskGroup() as group:
            for replica in made:
                group.create_task(replica.start())
        yield made
    finally:
        for replica in made:
            await replica.close()


@contextlib.asynccontextmanager
async def cluster(directory, model, arguments, *gateway):
    """Replicas, and a gateway in front of them that looks at them often."""
    async with replicas_at(directory, arguments) as replicas:
        workers = [option for replica in replicas for option in ("--worker", replica.url)]
        options = ("--pool-poll-interval", 0.2, "--pool-probe-timeout", 2, *gateway)
        with serve("--model", model, "--served-model-name", "m", *workers, *options) as served:
            made = Cluster(replicas, served)
            await made.workers_up(len(replicas))
            yield made


def simulated(model, *more, step=0.02):
    """Arguments of a simulated replica with the model's tokenizer."""
    return (
        *("--model", model, "--model-name", "m", "--simulate", "--sim-step", step, "--num-blocks", 2000),
        *("--sim-grammars", "ignore", "--debug-integrity", *more),
    )


def dice(seed):
    """The same throws in every run."""
    return random.Random(seed)
