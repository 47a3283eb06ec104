"""A gateway process among others that share its port: tells them what it is told, and hears what they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Self

import msgspec
from aiohttp import web

from cli.serving import ProcessPlan
from gateway.discovery.registration import Registration, Registry
from gateway.dispatch import PoolDispatcher
from gateway.peers import Deregister, Drain, LocalWorkers, PeerRoutes, Peers, Register, State, Word
from gateway.pipeline import Pipeline
from gateway.telemetry.merging import merged
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import TurnError

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.2
_CATCH_UP_SECONDS = 60.0
# How long a process may keep its port closed because it does not have all the workers that its peers have.
_JOIN_SECONDS = 10.0


class ToldRegistry(Registry):
    """Workers that have registered here or with a peer."""

    def __init__(self, peers: Peers, *, max_workers: int) -> None:
        super().__init__(max_workers=max_workers)
        self._peers = peers

    def register(self, registration: Registration) -> None:
        super().register(registration)
        self._peers.tell(Register(msgspec.Raw(msgspec.json.encode(registration))))

    def deregister(self, name: str) -> bool:
        self._peers.tell(Deregister(name))
        return super().deregister(name)

    def heard(self, word: Register | Deregister) -> None:
        """A peer was told."""
        if isinstance(word, Deregister):
            super().deregister(word.worker)
            return
        try:
            super().register(msgspec.json.decode(word.registration, type=Registration))
        except (msgspec.DecodeError, TurnError) as error:
            log.warning("a registration that another process took is not taken here: %s", error)


class Peering:
    """`async with`: the peers' socket is served. It begins before the public port: `joined` says when that may open, `listens`
    that it has."""

    def __init__(
        self,
        process: ProcessPlan,
        dispatcher: PoolDispatcher,
        telemetry: Telemetry,
        pipeline: Pipeline,
        reasons: Callable[[], list[str]],
    ) -> None:
        self.peers = Peers(process.socket.parent, process.socket)
        self._process = process
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._pipeline = pipeline
        self._reasons = reasons
        self._registry: ToldRegistry | None = None
        self._local: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._listens = False

    def registry(self, *, max_workers: int) -> ToldRegistry:
        """The source of workers that register. Call once."""
        self._registry = ToldRegistry(self.peers, max_workers=max_workers)
        return self._registry

    def drain(self, name: str, draining: bool) -> bool:
        """As `PoolDispatcher.drain`, for all processes."""
        self.peers.tell(Drain(name, draining))
        return self._dispatcher.drain(name, draining)

    async def metrics(self) -> bytes:
        """Of all processes together."""
        return merged([self._telemetry.render_metrics(), *await self.peers.ask("/metrics")])

    async def joined(self) -> None:
        """Waits until this process can take the turns that its peers can.

        The kernel gives connections to whoever listens. A process that was started again and listened before it knew of the
        workers would refuse turns that any of the others serves.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _JOIN_SECONDS
        while missing := set((await self.peers.state()).ready) - set(self._state().ready):
            if loop.time() >= deadline:
                log.warning("other processes of this gateway have workers that this one does not reach: %s", sorted(missing))
                return
            await asyncio.sleep(_LOOK_EVERY)

    def listens(self) -> None:
        """The public port is open."""
        self._listens = True

    async def __aenter__(self) -> Self:
        routes = PeerRoutes(heard=self._heard, state=self._state, metrics=self._telemetry.render_metrics, ready=self._ready)
        self._runner = web.AppRunner(routes.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._process.socket).start()
        self._catching_up = asyncio.create_task(self._catch_up())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.gather(self._catching_up, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        self._process.socket.unlink(missing_ok=True)
        await self.peers.aclose()

    def _heard(self, word: Word) -> None:
        match word:
            case Drain():
                self._dispatcher.drain(word.worker, word.draining)
            case LocalWorkers():
                for name in self._local - word.urls.keys():
                    self._dispatcher.remove_worker(name)
                for name, url in word.urls.items():
                    self._dispatcher.add_worker(name, url)
                self._local = set(word.urls)
            case Register() | Deregister():
                if self._registry is not None:
                    self._registry.heard(word)

    def _state(self) -> State:
        views = self._dispatcher.workers()
        return State(
            tuple(view.name for view in views if view.draining), tuple(view.name for view in views if view.state == "ready")
        )

    async def _ready(self) -> Literal[True] | str:
        if not self._listens:
            return "It does not listen yet."
        for reason in self._reasons():
            return reason
        for model in self._pipeline.models.all:
            try:
                self._pipeline.pool_info(model)
            except TurnError as error:
                return error.message
        return True

    async def _catch_up(self) -> None:
        """A process that was started again drains what the others drain, as soon as it knows of the worker."""
        missing = set((await self.peers.state()).draining)
        deadline = asyncio.get_running_loop().time() + _CATCH_UP_SECONDS
        while missing and asyncio.get_running_loop().time() < deadline:
            missing -= {name for name in missing if self._dispatcher.drain(name, True)}
            await asyncio.sleep(_LOOK_EVERY)
