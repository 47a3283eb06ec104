"""The life of a replica process: listen, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from aiohttp import web

from engine.core import EngineCore
from engine.server.app import ReplicaApp
from engine.server.config import ServerConfig
from engine.server.listen import BACKLOG, Address, Listener, listen
from engine.thread import EngineThread, EngineThreadConfig

if TYPE_CHECKING:  # ZMQ is loaded only where it is used
    from engine.server.registration import Registrar, RegistrationConfig
    from engine.server.vllm.publisher import KVEventPublisher

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

EXIT_OK, EXIT_ENGINE_FAILED = 0, 3

LOAD_THREAD = "load"
"""The name of the thread that loads a model. It may outlive `serve`."""

_GRACE = 5.0  # for answers that are under way when the streams have ended


@dataclass(frozen=True, slots=True)
class Ready:
    """What the process announces once it can generate."""

    address: str
    instance: str
    pid: int


async def serve(
    load: Callable[[], EngineCore[Any]],
    address: Address,
    config: ServerConfig,
    thread_config: EngineThreadConfig,
    *,
    otlp_url: str | None = None,
    registration: RegistrationConfig | None = None,
    on_ready: Callable[[Ready], None],
) -> int:
    """Serves until a signal comes (returns 0) or the engine fails for good (returns 3).

    Listens at once, so that a taken port is known before a model is loaded; `load` runs on a thread while /health says that
    the replica is starting. Raises ListenError, and whatever `load` raises. Must run on the main thread: it takes over
    SIGTERM and SIGINT.
    """
    listener = listen(address, config.write_timeout)
    try:
        with _signals() as signals:
            return await _serve(load, listener, config, thread_config, otlp_url, registration, on_ready, signals)
    finally:
        listener.close()


@runtime_checkable
class Closeable(Protocol):
    """A core that keeps something running beside its steps."""

    def close(self) -> None:
        """Ends it; no step runs any more."""


class _Signals:
    """`first`: stop, with grace. `second`: stop now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self, number: int) -> None:
        logger.info("%s received", signal.Signals(number).name)
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signals.receive, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _serve(
    load: Callable[[], EngineCore[Any]],
    listener: Listener,
    config: ServerConfig,
    thread_config: EngineThreadConfig,
    otlp_url: str | None,
    registration: RegistrationConfig | None,
    on_ready: Callable[[Ready], None],
    signals: _Signals,
) -> int:
    replica = ReplicaApp(config)
    runner = web.AppRunner(
        replica.app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE, handle_signals=False
    )
    await runner.setup()
    site = web.SockSite(runner, listener.socket, backlog=BACKLOG)
    await site.start()
    core: EngineCore[Any] | None = None
    engine: EngineThread | None = None
    close_tracing: Callable[[], None] | None = None
    publisher: KVEventPublisher | None = None
    registrar: Registrar | None = None
    try:
        core = await _first_of(_on_daemon_thread(load), signals.first)
        if core is None:
            return EXIT_OK
        logger.info("%s: %d KV blocks of %d tokens", core.info.model, core.info.num_blocks, core.info.block_size)
        engine = EngineThread(core, thread_config)
        if otlp_url is not None:
            from engine.server.tracing import RequestTracing

            tracing = RequestTracing(otlp_url, core.info)
            engine.observers.append(tracing)
            close_tracing = tracing.close
        await engine.start()
        if config.kv_events is not None:
            from engine.server.vllm.publisher import KVEventPublisher

            publisher = KVEventPublisher(engine, config.kv_events, config.kv_replay, config.kv_topic)
            await publisher.start()
        replica.attach(engine, publisher.book if publisher is not None else None)
        on_ready(Ready(listener.url, core.info.instance, os.getpid()))
        if registration is not None:
            from engine.server.registration import Registrar

            registrar = Registrar(_complete(registration, listener.url))
            await registrar.start()
        failure = await _first_of(engine.failed(), signals.first)
        if failure is not None:
            logger.error("%s", failure)
            return EXIT_ENGINE_FAILED
        if registrar is not None:
            await registrar.stop()  # before anything is refused
        await site.stop()  # no new connections; open ones are told that the replica shuts down
        logger.info("shutting down: %d requests in flight have %g seconds", engine.in_flight, config.shutdown_timeout)
        await _first_of(engine.drain(config.shutdown_timeout), signals.second)
        return EXIT_OK
    finally:
        if registrar is not None:
            await registrar.stop()
        replica.end_subscriptions()
        if publisher is not None:
            await publisher.aclose()
        if engine is not None:
            await engine.close()
        if isinstance(core, Closeable):
            core.close()
        await runner.cleanup()
        if close_tracing is not None:
            await asyncio.to_thread(close_tracing)


def _complete(registration: RegistrationConfig, url: str) -> RegistrationConfig:
    """With the address and name that follow from where it listens."""
    url = registration.url or url
    name = registration.name or f"{socket.gethostname()}-{re.sub(r'[^A-Za-z0-9]+', '-', url).strip('-')}"
    return dataclasses.replace(registration, url=url, name=name[:128])


def _on_daemon_thread(work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Unlike the loop's own executor, it does not keep the process from exiting before `work` is done."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(ResultT, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - it is raised where the future is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has gone: the process is exiting
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=LOAD_THREAD, daemon=True).start()
    return future


async def _first_of(work: Awaitable[ResultT], event: asyncio.Event) -> ResultT | None:
    """The result of the awaitable `work`, or None when `event` is set before."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for leftover in (task, waiter):
            leftover.cancel()
