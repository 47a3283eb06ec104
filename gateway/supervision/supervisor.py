"""Keeps N local replica processes alive, and says clearly why one died."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.supervision.config import CommandFor, SupervisorConfig
from gateway.supervision.death import Death
from gateway.supervision.process import Forward, ReplicaProcess
from gateway.supervision.runtime_dir import RuntimeDir

log = logging.getLogger(__name__)


class ReplicaStartError(Exception):
    """A replica died again and again before it was ever ready. The message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica that answers /health: `url` is `unix:PATH`, new at every start."""

    name: str
    number: int
    url: str
    pid: int


def print_line(name: str, line: str) -> None:
    """A replica's line on our standard error, with its name before it."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


class Supervisor:
    """Starts, watches, restarts and stops replicas. `on_up` and `on_down` are called on the event loop.

    `async with Supervisor(...) as s: await s.ready()` raises ReplicaStartError when a replica cannot be started. Run it on
    the main thread's event loop. At the end every process is gone and every socket removed; if this process is killed, the
    kernel kills the replicas.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        command_for: CommandFor,
        *,
        on_up: Callable[[ReplicaUp], None],
        on_down: Callable[[str], None],
        forward: Forward = print_line,
        kind: str = "replica",
        given: bytes | None = None,
        directory: RuntimeDir | None = None,
    ) -> None:
        """`kind`: what they are called, with a number. `given`: what each reads from its standard input. `directory`: of their
        sockets, where it is not to be one of their own."""
        self._kind = kind
        self._given = given
        self._own_dir = directory is None
        self._shared_dir = directory
        self._config = config
        self._command_for = command_for
        self._on_up = on_up
        self._on_down = on_down
        self._forward = forward
        self._cores = divide_cores(_usable_cores() if config.cores is None else config.cores, config.replicas)
        self._dir: RuntimeDir | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lives = [0] * config.replicas
        self._up_once = [asyncio.Event() for _ in range(config.replicas)]
        self._failure: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Supervisor:
        self._failure = asyncio.get_running_loop().create_future()
        self._dir = self._shared_dir if self._shared_dir is not None else RuntimeDir(self._config.runtime_dir)
        self._tasks = [
            asyncio.create_task(self._keep(number, self._dir), name=f"{self._kind}-{number}")
            for number in range(self._config.replicas)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            if self._dir is not None and self._own_dir:
                self._dir.close()
            if self._failure is not None:
                self._failure.cancel()

    async def ready(self) -> None:
        """Waits until every replica was up once. Raises ReplicaStartError."""

        async def all_up() -> None:
            for event in self._up_once:
                await event.wait()

        everyone = asyncio.ensure_future(all_up())
        failed = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait({everyone, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            for waiter in (everyone, failed):
                waiter.cancel()
            await asyncio.gather(everyone, failed, return_exceptions=True)

    async def failed(self) -> None:
        """Runs until a replica is given up, then raises ReplicaStartError; otherwise until cancelled."""
        if self._failure is None:
            raise RuntimeError("the supervisor was not started")
        await asyncio.shield(self._failure)

    async def _keep(self, number: int, directory: RuntimeDir) -> None:
        name = f"{self._kind}-{number}"
        early_deaths = 0
        wait = self._config.backoff_first
        try:
            while True:
                self._lives[number] += 1
                death, was_up = await self._live(number, name, directory)
                if not was_up and not self._up_once[number].is_set():
                    early_deaths += 1
                    if self._is_hopeless(death, early_deaths):
                        self._give_up(name, early_deaths, death)
                        return
                if was_up and death.uptime >= self._config.healthy_period:
                    wait = self._config.backoff_first
                log.error(
                    "%s died after %.1f s (%s); starting it again in %.1f s%s",
                    name,
                    death.uptime,
                    death.cause,
                    wait,
                    f". Its last lines:{death.printed}" if death.last_lines else "",
                )
                await asyncio.sleep(wait)
                wait = min(wait * 2, self._config.backoff_max)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("%s can no longer be supervised", name)
            self._fail(f"{name} can no longer be supervised: {error}")

    async def _live(self, number: int, name: str, directory: RuntimeDir) -> tuple[Death, bool]:
        """One life of a replica: (how it ended, whether it was ever ready). When cancelled, stops it first."""
        config = self._config
        cores = self._cores[number]
        socket = directory.path / f"{name}-{self._lives[number]}.sock"
        process = ReplicaProcess(name, socket, config.stderr_lines, self._forward)
        was_up = False
        try:
            await process.launch(
                self._command_for(number, socket, len(cores)), cores if config.pin_cores else None, self._given
            )
            death = await process.until_ready(config.startup_timeout, config.probe_interval)
            if death is not None:
                return death, False
            was_up = True
            log.info("%s is up (pid %d, cores %s)", name, process.pid, ",".join(map(str, cores)))
            self._on_up(ReplicaUp(name, number, process.url, process.pid))
            self._up_once[number].set()
            return await process.wait(), True
        finally:
            # Told after the process has had its time to finish streams, when this is an orderly stop.
            try:
                await process.stop(config.stop_timeout)
            finally:
                if was_up:
                    self._on_down(name)

    def _is_hopeless(self, death: Death, early_deaths: int) -> bool:
        return early_deaths >= self._config.startup_attempts or (
            death.reason is None and death.returncode in self._config.fatal_exit_codes
        )

    def _give_up(self, name: str, deaths: int, death: Death) -> None:
        times = "once" if deaths == 1 else f"{deaths} times"
        said = f"Its last lines:{death.printed}" if death.last_lines else "It printed nothing."
        self._fail(f"{name} died {times} before it was ready and was given up ({death.cause}). {said}")

    def _fail(self, sentence: str) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(ReplicaStartError(sentence))
            # Whoever waits will see it; if nobody does, it is no forgotten exception either.
            self._failure.exception()


def divide_cores(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    """Each replica's own cores, neighbours together; they share when there are fewer cores than replicas."""
    if len(cores) < replicas:
        return [(cores[number % len(cores)],) for number in range(replicas)]
    small, larger = divmod(len(cores), replicas)
    parts, start = [], 0
    for number in range(replicas):
        size = small + (number < larger)
        parts.append(tuple(cores[start : start + size]))
        start += size
    return parts


def _usable_cores() -> tuple[int, ...]:
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
