"""`turnkeep serve --processes N`: gateways that share a port, and the process that looks after them and their replicas.

The kernel gives each connection to one of them (SO_REUSEPORT). This process serves nothing itself: it holds the port, so that
nobody else gets it while all of them are away, keeps them and the replicas alive, and tells them which replicas there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cli.private_redis import PrivateRedis
from cli.serving import ServePlan, replica_command
from gateway.config import SessionsConfig
from gateway.models import ServedModel
from gateway.peers import LocalWorkers, Peers
from gateway.server import ListenError, why_not
from gateway.supervision.config import SupervisorConfig
from gateway.supervision.runtime_dir import RuntimeDir
from gateway.supervision.supervisor import ReplicaUp, Supervisor, print_line
from gateway.workers.views import WorkerView
from sessions.redis_link import RedisConfig

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.2
_TELL_AGAIN = 1.0


class RunningProcesses:
    """Gateways that listen on one port: what `cli.serving.RunningGateway` is for a single one."""

    def __init__(
        self, url: str, admin_url: str | None, children: Supervisor, replicas: Supervisor | None, peers: Peers, plan: ServePlan
    ) -> None:
        self.url = url
        self.admin_url = admin_url
        self.expected = plan.replicas.count + len(plan.workers)
        self._count = plan.processes
        self._children = children
        self._replicas = replicas
        self._peers = peers

    def workers(self) -> Sequence[WorkerView]:
        """None: the gateways know them, this process does not."""
        return ()

    async def ready(self) -> None:
        """Waits until every process has workers. Raises ReplicaStartError when a process or a replica cannot be started."""
        await self._first(self._all_ready())

    async def failed(self) -> None:
        """Runs until a process or a replica is given up, then raises ReplicaStartError; otherwise until it is cancelled."""
        await self._first(asyncio.get_running_loop().create_future())

    async def _all_ready(self) -> None:
        if self._replicas is not None:
            await self._replicas.ready()
        await self._children.ready()
        while True:
            sockets = self._peers.sockets()
            answers = await asyncio.gather(*(self._peers.is_ready(path) for path in sockets))
            if len(sockets) >= self._count and all(answers):
                return
            await asyncio.sleep(_LOOK_EVERY)

    async def _first(self, waiting: asyncio.Future[None] | object) -> None:
        supervisors = [self._children, *([self._replicas] if self._replicas is not None else [])]
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(waiting)]  # type: ignore[arg-type]
        tasks += [asyncio.ensure_future(supervisor.failed()) for supervisor in supervisors]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def open_processes(
    plan: ServePlan, *, forward: Callable[[str, str], None] = print_line
) -> AsyncIterator[RunningProcesses]:
    """Starts `plan.processes` gateways and their replicas, and ends them in order: gateways first, whose streams the replicas
    finish. Raises ListenError, ModelFilesError."""
    for model in plan.gateway.models:
        ServedModel.load(model)  # What is wrong with it is said once, not by every process.
    http, auth = plan.gateway.http, plan.gateway.auth
    async with AsyncExitStack() as stack:
        directory = RuntimeDir()
        stack.callback(directory.close)
        port = _reserve(stack, http.host, http.port)
        admin_port = None if auth.admin_port is None else _reserve(stack, auth.admin_host, auth.admin_port, "--admin-")
        redis = await _redis(stack, plan, directory)
        peers = Peers(directory.path)
        workers = _Workers(peers)
        stack.push_async_callback(workers.aclose)
        replicas = None
        if plan.replicas.count:
            replicas = Supervisor(
                SupervisorConfig(replicas=plan.replicas.count),
                lambda _number, path, threads: replica_command(plan, path, threads),
                on_up=workers.up,
                on_down=workers.down,
                forward=forward,
                directory=directory,
            )
        told = dataclasses.replace(
            plan,
            gateway=dataclasses.replace(
                plan.gateway,
                http=dataclasses.replace(http, port=port),
                auth=dataclasses.replace(auth, admin_port=admin_port),
                sessions=_shared_out(plan),
            ),
            redis=redis,
            sources=(),
        )
        children = Supervisor(
            SupervisorConfig(
                replicas=plan.processes, pin_cores=False, startup_timeout=120.0, stop_timeout=http.shutdown_timeout + 10.0
            ),
            _child_command,
            on_up=lambda _up: workers.again(),
            on_down=lambda _name: None,
            forward=forward,
            kind="process",
            given=pickle.dumps(told),
            directory=directory,
        )
        if replicas is not None:
            await stack.enter_async_context(replicas)
        await stack.enter_async_context(children)
        scheme = "http" if http.tls_cert is None else "https"
        yield RunningProcesses(
            _url(scheme, http.host, port),
            None if admin_port is None else _url("http", auth.admin_host, admin_port),
            children,
            replicas,
            peers,
            plan,
        )


class _Workers:
    """Tells the gateways which replicas there are, until each has heard."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._urls: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._tell())

    def up(self, replica: ReplicaUp) -> None:
        self._urls[replica.name] = replica.url
        self.again()

    def down(self, name: str) -> None:
        self._urls.pop(name, None)
        self.again()

    def again(self) -> None:
        self._changed.set()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tell(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            word = LocalWorkers(dict(self._urls))
            heard = await asyncio.gather(*(self._peers.tell_one(path, word) for path in self._peers.sockets()))
            if not all(heard):
                try:
                    async with asyncio.timeout(_TELL_AGAIN):
                        await self._changed.wait()
                except TimeoutError:
                    self._changed.set()


def _child_command(number: int, path: Path, _threads: int) -> list[str]:
    return [sys.executable, "-P", "-m", "cli.gateway_child", str(number), str(path)]


def _shared_out(plan: ServePlan) -> SessionsConfig:
    sessions = plan.gateway.sessions
    return dataclasses.replace(sessions, max_bytes=max(sessions.max_bytes // plan.processes, 1))


async def _redis(stack: AsyncExitStack, plan: ServePlan, directory: RuntimeDir) -> RedisConfig | None:
    """The user's Redis, else one of our own where the program is there, else none."""
    if plan.redis is not None:
        return plan.redis
    program = shutil.which("redis-server")
    if program is None:
        log.warning(
            "The processes share no sessions: there is no redis-server here, and no --redis. A turn that comes to another "
            "process than the one before is tokenised whole."
        )
        return None
    private = PrivateRedis(program, directory.path, plan.gateway.sessions.max_bytes)
    await stack.enter_async_context(private)
    return private.config


def _reserve(stack: AsyncExitStack, host: str, port: int, options: str = "--") -> int:
    """Takes a port for processes that share it, and for nobody else. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            with socket.socket(family, kind, protocol) as probe:
                # Sharing a port with somebody who happens to share theirs as well would be no error to the kernel.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address[0], port, *address[2:]))
            held = stack.enter_context(socket.socket(family, kind, protocol))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind((address[0], port, *address[2:]))
            port = held.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise ListenError(why_not(host, port, error, options)) from error
    return port


def _url(scheme: str, host: str, port: int) -> str:
    if host in ("0.0.0.0", "", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
