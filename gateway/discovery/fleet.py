"""Keeps the dispatcher's workers in step with what sources say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.workers.spec import WorkerSpec
from gateway.workers.views import WorkerView

log = logging.getLogger(__name__)

_LOOK_AGAIN = 0.1


class Publish(Protocol):
    """What a source calls with all the workers it knows of, by name, whenever they have changed."""

    def __call__(self, workers: Mapping[str, WorkerSpec]) -> None: ...


class WorkerSource(Protocol):
    """Something that knows of workers. `name` begins the names of its workers and is its own among all sources."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> frozenset[str]:
        """Of the workers it may name."""

    async def run(self, publish: Publish) -> None:
        """Publishes until it is cancelled. What goes wrong is logged and tried again; what was known stays meanwhile."""


class Workers(Protocol):
    """What a fleet needs of the dispatcher."""

    def add_worker(self, name: str, worker: str | WorkerSpec) -> None: ...

    def remove_worker(self, name: str) -> None: ...

    def drain(self, name: str, draining: bool) -> bool: ...

    def workers(self) -> Sequence[WorkerView]: ...


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`max_workers`: of all sources together; more are left out, loudly. `drain_timeout`: seconds for which a worker that is no
    longer named may finish what it has. `restart_after`: before a source that failed is run again."""

    max_workers: int = 1024
    drain_timeout: float = 120.0
    restart_after: float = 5.0

    def __post_init__(self) -> None:
        if self.max_workers < 1:
            raise ValueError(f"discovery.max_workers must be at least 1, not {self.max_workers}")
        for name in ("drain_timeout", "restart_after"):
            if not getattr(self, name) > 0:
                raise ValueError(f"discovery.{name} must be positive, not {getattr(self, name)}")


class Fleet:
    """Runs sources; `async with` ends them. A worker that its source no longer names gets nothing new, and is forgotten once it
    has finished what it has. One that comes back meanwhile is taken back."""

    def __init__(self, config: FleetConfig, workers: Workers, sources: Sequence[WorkerSource]) -> None:
        names = [source.name for source in sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources of workers are called '{twice}'")
        self._config = config
        self._workers = workers
        self._sources = tuple(sources)
        self._known: dict[str, dict[str, WorkerSpec]] = {name: {} for name in names}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._tasks = [asyncio.create_task(self._run(source), name=f"workers-{source.name}") for source in self._sources]
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._tasks, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def publish(self, source: str, workers: Mapping[str, WorkerSpec]) -> None:
        """What a source knows of now."""
        known = self._known[source]
        wanted = {f"{source}-{name}": spec for name, spec in workers.items()}
        for name in [name for name in known if name not in wanted]:
            del known[name]
            log.info("worker %s is no longer named: it finishes what it has", name)
            self._leave(name)
        for name, spec in wanted.items():
            if name not in known and sum(map(len, self._known.values())) >= self._config.max_workers:
                log.error("worker %s is left out: there are %d already (discovery.max_workers)", name, self._config.max_workers)
                continue
            self._stay(name)
            known[name] = spec
            self._workers.add_worker(name, spec)

    async def _run(self, source: WorkerSource) -> None:
        while True:
            try:
                await source.run(lambda workers: self.publish(source.name, workers))
            except Exception:
                log.exception("looking for workers by %s failed", source.name)
            await asyncio.sleep(self._config.restart_after)

    def _leave(self, name: str) -> None:
        if self._workers.drain(name, True) and name not in self._leaving:
            self._leaving[name] = asyncio.create_task(self._forget(name))

    def _stay(self, name: str) -> None:
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            leaving.cancel()
            self._workers.drain(name, False)

    async def _forget(self, name: str) -> None:
        """Waits until nothing runs there."""
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                while any(view.name == name and view.in_flight for view in self._workers.workers()):  # noqa: ASYNC110
                    # That every end of a request told somebody would cost all the others.
                    await asyncio.sleep(_LOOK_AGAIN)
        except TimeoutError:
            log.warning("worker %s has not finished within %g s; what runs there breaks off", name, self._config.drain_timeout)
        # Whoever bears the name next is somebody else.
        self._workers.drain(name, False)
        self._workers.remove_worker(name)
        self._leaving.pop(name, None)
