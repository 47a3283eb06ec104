"""Composes a running gateway: replicas, dispatcher, HTTP front, recorder and telemetry, in order."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.admission.gate import make_gate
from gateway.app import make_apps
from gateway.config import GatewayConfig
from gateway.discovery.fleet import Fleet, FleetConfig, WorkerSource
from gateway.discovery.registration import RegistrationRoutes, Registry
from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.models import ModelRegistry, ServedModel
from gateway.passthrough.endpoint import PassThrough
from gateway.pipeline import Pipeline
from gateway.server import HttpServer
from gateway.supervision.config import SupervisorConfig
from gateway.supervision.supervisor import ReplicaUp, Supervisor, print_line
from gateway.telemetry.config import TelemetryConfig
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import TurnObserver
from gateway.workers.spec import WorkerSpec
from gateway.workers.views import WorkerView
from sessions.file_store import FileLedgerStore
from sessions.memory_store import MemoryLedgerStore
from sessions.redis_link import RedisConfig
from sessions.shared import SharedSessions
from traces.recorder import Recorder, RecorderConfig


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Local replicas: how many, and the arguments of `turnkeep engine` beside model and socket."""

    count: int
    arguments: tuple[str, ...] = ()
    cache_dir: Path | None = None
    otlp_url: str | None = None


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """What `sources` are made of, for processes that each have their own: --worker, --workers-file, the environment."""

    worker: tuple[str, ...]
    workers_file: str | None
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Everything `turnkeep serve` was told. `workers`: those that run elsewhere; `sources`: where to find more of them;
    `registration_token`: what workers need to register themselves (None: they cannot)."""

    gateway: GatewayConfig
    replicas: ReplicaPlan
    workers: tuple[WorkerSpec, ...] = ()
    sources: tuple[WorkerSource, ...] = ()
    registration_token: str | None = field(default=None, repr=False)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    record: Path | None = None
    redis: RedisConfig | None = None
    session_dir: Path | None = None
    processes: int = 1
    log_level: str = "info"
    discovery: DiscoveryOptions | None = None


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One of several processes that share a port. `socket`: where its peers reach it."""

    socket: Path


class RunningGateway:
    """A gateway that listens. Its replicas may still be loading: `ready` waits for them."""

    def __init__(
        self,
        server: HttpServer,
        admin: HttpServer | None,
        dispatcher: PoolDispatcher,
        supervisor: Supervisor | None,
        expected: int,
    ) -> None:
        self._server = server
        self._admin = admin
        self._supervisor = supervisor
        self.dispatcher = dispatcher
        self.expected = expected

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        return self._server.url

    @property
    def admin_url(self) -> str | None:
        """Where an administrator on this machine reaches it, where there is a port for that."""
        return self._admin.url if self._admin is not None else None

    def workers(self) -> list[WorkerView]:
        """Every worker, with its state."""
        return list(self.dispatcher.workers())

    async def ready(self) -> None:
        """Waits until every local replica can take turns, or, where all workers are elsewhere, until one of them can.

        Raises ReplicaStartError when a local replica cannot be started.
        """
        if self._supervisor is None:
            await self.dispatcher.wait_ready(1)
            return
        await self._supervisor.ready()
        await self._unless_failed(self.dispatcher.wait_ready(self.expected))

    async def failed(self) -> None:
        """Runs until a local replica is given up, then raises ReplicaStartError; otherwise until it is cancelled."""
        if self._supervisor is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._supervisor.failed()

    async def _unless_failed(self, waiting: Coroutine[Any, Any, None]) -> None:
        ready = asyncio.ensure_future(waiting)
        failed = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
            for task in (failed, ready):
                if task.done():
                    task.result()
        finally:
            for task in (ready, failed):
                task.cancel()
            await asyncio.gather(ready, failed, return_exceptions=True)


@asynccontextmanager
async def open_gateway(
    plan: ServePlan, *, forward: Callable[[str, str], None] = print_line, process: ProcessPlan | None = None
) -> AsyncIterator[RunningGateway]:
    """Starts a gateway and ends it in order: no new connections, streams finished, replicas stopped, records written.

    The port is taken before replicas are started, so that a port in use costs no loading; one of several processes, for which
    the port is held already, listens when it knows the workers that the others know. Raises ListenError,
    ModelFilesError, RecorderError. `forward` takes what replicas print: (name, line). `process`: it is one of several.
    """
    registry = ModelRegistry(ServedModel.load(config) for config in plan.gateway.models)
    stopping = False

    def reasons() -> list[str]:
        if stopping:
            return ["The gateway is shutting down."]
        if not plan.gateway.models and not dispatcher.pool.opaque_models():
            return ["No worker is up yet."]
        return []

    async with AsyncExitStack() as stack:
        observers: list[TurnObserver] = []
        if plan.record is not None:
            recorder = Recorder(RecorderConfig(plan.record))
            stack.callback(recorder.close)
            observers.append(recorder)
        telemetry = Telemetry(plan.telemetry)
        stack.push_async_callback(telemetry.aclose)
        dispatcher = await stack.enter_async_context(PoolDispatcher(plan.pool, telemetry, admission=plan.gateway.admission))

        def up(replica: ReplicaUp) -> None:
            dispatcher.add_worker(replica.name, replica.url)

        supervisor = None
        if plan.replicas.count:
            supervisor = Supervisor(
                SupervisorConfig(replicas=plan.replicas.count),
                lambda _number, socket, threads: replica_command(plan, socket, threads),
                on_up=up,
                on_down=dispatcher.remove_worker,
                forward=forward,
            )
        store = MemoryLedgerStore(plan.gateway.sessions.max_bytes)
        kept = None
        if plan.session_dir is not None:
            kept = FileLedgerStore(store, plan.session_dir, plan.gateway.sessions.max_bytes)
            stack.push_async_callback(kept.aclose)
        shared = None
        if plan.redis is not None:
            shared = SharedSessions(plan.redis, store)
            stack.push_async_callback(shared.aclose)
            telemetry.watch_shared_sessions(shared)
        held = shared.store if shared is not None else kept if kept is not None else store
        pipeline = Pipeline(plan.gateway, registry, dispatcher, telemetry, observers, store=held)
        if shared is not None:
            shared.share_gaps(pipeline.watch.gaps.model, plan.gateway.gaps)
        peering = None
        if process is not None:
            from cli.peering import Peering

            peering = Peering(process, dispatcher, telemetry, pipeline, reasons)
        sources = plan.sources
        registration = None
        if plan.registration_token is not None:
            most = plan.fleet.max_workers
            registered = Registry(max_workers=most) if peering is None else peering.registry(max_workers=most)
            registration = RegistrationRoutes(registered, plan.registration_token)
            sources = (*sources, registered)
        gate = make_gate(
            plan.gateway,
            telemetry,
            rooms=dispatcher.rooms,
            some_room=dispatcher.some_room,
            shared_limits=shared.link if shared is not None else None,
        )
        dispatcher.when_freed(gate.admission.freed)
        passthrough = PassThrough(dispatcher, telemetry, plan.gateway.http, plan.pool.max_attempts, gate)
        apps = make_apps(
            plan.gateway,
            pipeline,
            reasons=reasons,
            workers=dispatcher.workers,
            routes=dispatcher.router.log,
            drain=dispatcher.drain if peering is None else peering.drain,
            metrics=None if peering is None else peering.metrics,
            passthrough=passthrough,
            registration=registration,
            gate=gate,
        )
        shared_port = process is not None
        server = HttpServer(apps.public, plan.gateway.http, reuse_port=shared_port)
        telemetry.watch_connections(server)
        auth = plan.gateway.auth
        admin = None
        if auth.admin_port is not None:
            at = dataclasses.replace(plan.gateway.http, host=auth.admin_host, port=auth.admin_port)
            admin = HttpServer(apps.administration, at, tls=False, reuse_port=shared_port, options="--admin-")
        # Replicas outlive the server, whose last streams they finish.
        async with AsyncExitStack() as replicas, AsyncExitStack() as ports:

            async def listen() -> None:
                await ports.enter_async_context(server)
                if admin is not None:
                    await replicas.enter_async_context(admin)

            if peering is None:
                await listen()
            if supervisor is not None:
                await replicas.enter_async_context(supervisor)
            # Who is left before it goes is not missed.
            replicas.push_async_callback(dispatcher.aclose)
            for position, spec in enumerate(plan.workers):
                dispatcher.add_worker(f"worker-{position}", spec)
            if peering is not None:
                await replicas.enter_async_context(peering)
            await replicas.enter_async_context(Fleet(plan.fleet, dispatcher, sources))
            if peering is not None:
                await peering.joined()
                await listen()
                peering.listens()
            try:
                yield RunningGateway(server, admin, dispatcher, supervisor, plan.replicas.count + len(plan.workers))
            finally:
                stopping = True


def replica_command(plan: ServePlan, socket: Path, threads: int) -> list[str]:
    """The command line of one local replica, of the first model. -P: a folder called `cli` where the user happens to stand is
    not ours."""
    model = plan.gateway.models[0]
    command = [sys.executable, "-P", "-m", "cli.main", "engine", "--model", str(model.directory), "--model-name", model.name]
    command += ["--uds", str(socket)]
    if "--threads" not in plan.replicas.arguments:
        command += ["--threads", str(threads)]
    if plan.replicas.cache_dir is not None:
        command += ["--cache-dir", str(plan.replicas.cache_dir)]
    if plan.replicas.otlp_url is not None and "--otlp" not in plan.replicas.arguments:
        command += ["--otlp", plan.replicas.otlp_url]
    return [*command, *plan.replicas.arguments]
