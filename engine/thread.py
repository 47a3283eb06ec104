"""An engine for an event loop: requests in, streams of chunks out, while `engine.step_loop` steps it on its own thread.

Requests are prepared on a small pool of workers and added between two steps; what a step produced crosses to the loop in one
piece. Nothing polls.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from engine.cancelling import CancellableCore
from engine.core import EngineCore, RequestRefused
from engine.server.stream import RequestStream
from engine.step_loop import FailurePolicy, News, StepLoop
from gateway.workers.protocol import Chunk, Done, Failed, GenerateRequest, RetentionHint, WorkerInfo, WorkerStats
from prefix_cache.event_log import DEFAULT_BATCHES, DEFAULT_BYTES, EventLog
from prefix_cache.events import KVEvent, Snapshot
from prefix_cache.hashing import TOKEN_BYTES, BlockHash

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class Unavailable(Exception):  # noqa: N818 - an answer, not an error
    """The engine takes no request right now. `code` as in docs/worker-protocol.md, `retry_after` in seconds if known."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


class Observer(Protocol):
    """Told on the event loop what happens. Metrics and tracing are observers; they must not block or raise."""

    def step_ended(self, seconds: float) -> None:
        """A step took `seconds`."""

    def chunk_arrived(self, stream: RequestStream, chunk: Chunk, at: float) -> None:
        """The step that ended at `at` (monotonic) produced `chunk`; the stream's own record does not include it yet."""

    def request_ended(self, stream: RequestStream, at: float) -> None:
        """A request ended (`stream.end` says how) or lost its reader (`stream.end` is None)."""


@dataclass(frozen=True, slots=True)
class EngineThreadConfig:
    """`max_requests`: requests in flight, those that wait among them; one more is refused with `queue_full`.

    `prepare_threads` prepare plain requests, and as many others those with a grammar, so that no schema delays a plain one.
    A step longer than `hang_seconds` counts as the engine's end. `debug_integrity` checks the books whenever the engine
    becomes idle.
    """

    max_requests: int = 1024
    prepare_threads: int = 2
    hang_seconds: float = 900.0
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    debug_integrity: bool = False
    event_batches: int = DEFAULT_BATCHES
    event_bytes: int = DEFAULT_BYTES


class _Phase(enum.Enum):
    PREPARING = enum.auto()  # the core has not heard of it
    POSTED = enum.auto()  # the engine thread adds it before its next step
    ADDED = enum.auto()


@dataclass(slots=True)
class _Entry:
    stream: RequestStream
    prompt_tokens: int
    phase: _Phase = _Phase.PREPARING


def _nothing(request_id: str) -> None:
    """For a core whose steps cannot end early."""


class EngineThread:
    """Runs `core` on a thread of its own. Everything here is for the event loop that called `start`."""

    def __init__(self, core: EngineCore[Any], config: EngineThreadConfig | None = None) -> None:
        self.config = EngineThreadConfig() if config is None else config
        self.info: WorkerInfo = core.info
        self.events = EventLog(core.info.instance, self.config.event_batches, self.config.event_bytes)
        self.observers: list[Observer] = []
        self._cancel: Callable[[str], None] = core.cancel if isinstance(core, CancellableCore) else _nothing
        self._prepare: Callable[[GenerateRequest], Any] = core.prepare
        self._steps = StepLoop(core, _Listener(self), self._deliver, self.config.failures, self.config.debug_integrity)
        self._loop: asyncio.AbstractEventLoop
        self._entries: dict[str, _Entry] = {}
        self._stats: WorkerStats = core.stats()
        self._accepting = False
        self._closed = False
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._snapshot: asyncio.Future[Snapshot] | None = None
        self._replies: set[asyncio.Future[Any]] = set()
        self._ends: deque[float] = deque(maxlen=32)
        self._plain_pool = ThreadPoolExecutor(self.config.prepare_threads, thread_name_prefix="prepare")
        self._grammar_pool = ThreadPoolExecutor(self.config.prepare_threads, thread_name_prefix="prepare-grammar")
        self._outbox: list[News] = []
        self._outbox_lock = threading.Lock()

    async def start(self) -> None:
        """Starts the thread. From here on the core is its own."""
        self._loop = asyncio.get_running_loop()
        self._accepting = True
        self._steps.start()

    async def submit(
        self, request: GenerateRequest, arrived: float | None = None, trace_headers: Mapping[str, str] | None = None
    ) -> RequestStream:
        """Checks a request and queues it. The stream's chunks come as steps produce them.

        Raises RequestRefused for one that cannot be served as it is, Unavailable when none can be taken now. `arrived`:
        when it came, on the monotonic clock; `trace_headers`: its W3C trace context.
        """
        self.check_available()
        request_id = request.request_id
        if request_id in self._entries:
            raise RequestRefused(
                "duplicate_request_id",
                f"A request with the id {request_id!r} is in flight; give every request an id of its own.",
                "request_id",
            )
        arrived = time.monotonic() if arrived is None else arrived
        stream = RequestStream(request, arrived, self._reader_gone, trace_headers)
        entry = self._entries[request_id] = _Entry(stream, _prompt_tokens(request))
        self._empty.clear()
        pool = self._plain_pool if request.grammar is None else self._grammar_pool
        try:
            prepared = await self._loop.run_in_executor(pool, self._prepare, request)
        except BaseException:
            # Refused, or the client has gone meanwhile; the core has not heard of it.
            self._forget(stream)
            raise
        if not (stream.ended or stream.closed):
            entry.phase = _Phase.POSTED
            self._steps.post(functools.partial(self._steps.add, stream, prepared))
        return stream

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is in flight."""
        return request_id in self._entries

    def check_available(self) -> None:
        """Raises Unavailable when no request can be taken now. Cheap: worth asking before a body is read."""
        if self._failure is not None:
            raise Unavailable("engine_failed", self._failure)
        if not self._accepting:
            raise Unavailable("shutting_down", "This replica is shutting down; use another one.", 1.0)
        if len(self._entries) >= self.config.max_requests:
            raise Unavailable(
                "queue_full",
                f"{self.config.max_requests} requests are in flight, as many as this replica takes; retry later or elsewhere.",
                self._predicted_wait(),
            )

    async def abort(self, request_id: str) -> bool:
        """Ends a request wherever it is; its blocks are free when this returns. False when it is not in flight."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.phase is _Phase.PREPARING:
            self._abort_stream(entry.stream)
            return True
        self._cancel(request_id)
        aborted = await self._ask(functools.partial(self._steps.abort, request_id))
        if aborted and self._entries.get(request_id) is entry:
            self._abort_stream(entry.stream)
        return aborted

    def stats(self) -> WorkerStats:
        """Load and totals as of the last step, and what has been submitted since."""
        unadded = [entry.prompt_tokens for entry in self._entries.values() if entry.phase is not _Phase.ADDED]
        return msgspec.structs.replace(
            self._stats,
            waiting=self._stats.waiting + len(unadded),
            waiting_prompt_tokens=self._stats.waiting_prompt_tokens + sum(unadded),
            draining=not self._accepting,
        )

    async def snapshot(self) -> Snapshot:
        """What the worker holds, as of the newest batch of `events`. Those who ask while one is made share it."""
        if self._snapshot is None:
            self._snapshot = self._new_reply()
            self._steps.post(self._steps.snapshot)
        return await asyncio.shield(self._snapshot)

    async def supersede(self, digests: Sequence[BlockHash]) -> int:
        """Blocks that will not be asked for again are evicted before all others. Returns how many of them there are."""
        return await self._ask(functools.partial(self._steps.supersede, digests))

    def retain(self, hints: Sequence[RetentionHint]) -> None:
        """What gateways say of sessions between two turns; takes effect before the next step."""
        self._steps.post(functools.partial(self._steps.retain, tuple(hints)))

    async def check_integrity(self) -> None:
        """Raises prefix_cache.block_pool.IntegrityError when the core's books do not balance between two steps."""
        await self._ask(self._steps.check_integrity)

    def health(self) -> str | None:
        """None when all is well, else a sentence that says what is not."""
        if self._failure is not None:
            return self._failure
        if not self._accepting:
            return "This replica is shutting down."
        return self._hanging()

    def _hanging(self) -> str | None:
        if self._steps.step_seconds() > self.config.hang_seconds:
            return f"The engine has been in one step for more than {self.config.hang_seconds:g} seconds; restart the replica."
        return None

    @property
    def is_accepting(self) -> bool:
        """False before `start` and once it drains or closes."""
        return self._accepting

    @property
    def in_flight(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._entries)

    async def failed(self) -> str:
        """Waits until the engine has failed for good, or hangs in one step; says why."""
        while not self._failed.is_set():
            try:
                async with asyncio.timeout(self.config.hang_seconds / 4):
                    await self._failed.wait()
            except TimeoutError:
                if (wrong := self._hanging()) is not None:
                    self._fail(wrong)
        return self._failure or ""

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits for those in flight. True when all of them ended within `seconds`."""
        self._accepting = False
        self._steps.post(self._steps.drain)
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, timeout: float = 10.0) -> None:
        """Ends what still runs with Failed("shutting_down"), gives its blocks back and stops the thread. Idempotent.

        A step that does not return within `timeout` seconds is left behind on its (daemon) thread, with a log line.
        """
        self._accepting = False
        self._closed = True
        for request_id, entry in list(self._entries.items()):
            self._steps.post(functools.partial(self._steps.abort, request_id))
            self._push(entry.stream, Failed("shutting_down", "The replica shut down before this request was finished."))
        self._steps.stop()
        if not await asyncio.to_thread(self._steps.join, timeout):
            logger.error("the engine's last step did not return within %g seconds and is abandoned", timeout)
        for pool in (self._plain_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._drop_replies("The replica is shutting down.")

    def _reader_gone(self, stream: RequestStream) -> None:
        entry = self._entries.get(stream.request_id)
        if entry is None or entry.stream is not stream:
            return
        self._end(stream, time.monotonic())
        if entry.phase is not _Phase.PREPARING:
            self._cancel(stream.request_id)
            self._steps.post(functools.partial(self._steps.abort, stream.request_id))

    def _abort_stream(self, stream: RequestStream) -> None:
        now = time.monotonic()
        stream.push_abort(now)
        self._end(stream, now)

    def _push(self, stream: RequestStream, chunk: Chunk, at: float | None = None) -> None:
        if stream.ended or stream.closed:
            return
        at = time.monotonic() if at is None else at
        for observer in self.observers:
            observer.chunk_arrived(stream, chunk, at)
        stream.push(chunk, at)
        if isinstance(chunk, Done | Failed):
            self._end(stream, at)

    def _end(self, stream: RequestStream, at: float) -> None:
        self._ends.append(at)
        for observer in self.observers:
            observer.request_ended(stream, at)
        self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        entry = self._entries.get(stream.request_id)
        if entry is not None and entry.stream is stream:
            del self._entries[stream.request_id]
            if not self._entries:
                self._empty.set()

    def _predicted_wait(self) -> float:
        """Whole seconds until a place is expected to be free: the mean time between the last requests' ends."""
        if not self._ends:
            return 1.0
        return float(min(max(math.ceil((time.monotonic() - self._ends[0]) / len(self._ends)), 1), 60))

    async def _ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Runs `question` on the engine thread before its next step. Raises Unavailable when the thread ends first."""
        reply: asyncio.Future[AnswerT] = self._new_reply()

        def answer() -> None:
            try:
                self._steps.tell(functools.partial(_resolve, reply, question()))
            except Exception as error:
                logger.exception("a question to the engine could not be answered")
                self._steps.tell(functools.partial(_reject, reply, error))

        self._steps.post(answer)
        return await reply

    def _new_reply(self) -> asyncio.Future[Any]:
        if self._failure is not None or self._closed:
            raise Unavailable("engine_failed", self._failure or "The replica is shutting down.")
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies.add(reply)
        reply.add_done_callback(self._reply_done)
        return reply

    def _reply_done(self, reply: asyncio.Future[Any]) -> None:
        self._replies.discard(reply)
        if not reply.cancelled():
            reply.exception()  # whoever waits has it; nobody may be left to

    def _drop_replies(self, message: str) -> None:
        self._snapshot = None
        for reply in list(self._replies):
            _reject(reply, Unavailable("engine_failed", message))

    def _fail(self, message: str) -> None:
        self._failure = message
        self._failed.set()
        for entry in list(self._entries.values()):
            self._push(entry.stream, Failed("engine_failed", message))
        self._drop_replies(message)

    def _deliver(self, news: list[News]) -> None:
        """On the engine thread. One call to the loop is on its way at most: a loop that is slow finds more in it."""
        with self._outbox_lock:
            called = bool(self._outbox)
            self._outbox.extend(news)
        if not called and news:
            self._loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        with self._outbox_lock:
            news, self._outbox = self._outbox, []
        for item in news:
            try:
                item()
            except Exception:
                logger.exception("a report of the engine could not be handled")


class _Listener:
    """The reports of the step loop; run on the event loop."""

    def __init__(self, owner: EngineThread) -> None:
        self._owner = owner

    def on_added(self, stream: RequestStream, refusal: RequestRefused | None) -> None:
        entry = self._owner._entries.get(stream.request_id)
        if entry is not None and entry.stream is stream:
            entry.phase = _Phase.ADDED
            if refusal is not None:
                self._owner._push(stream, Failed(refusal.code, refusal.message))

    def on_step(self, produced: list[tuple[RequestStream, Chunk]], at: float) -> None:
        for stream, chunk in produced:
            self._owner._push(stream, chunk, at)

    def on_events(self, events: list[KVEvent]) -> None:
        self._owner.events.append(events)

    def on_snapshot(self, tiers: dict[str, bytes]) -> None:
        reply, self._owner._snapshot = self._owner._snapshot, None
        if reply is not None:
            _resolve(reply, self._owner.events.snapshot(tiers))

    def on_stats(self, stats: WorkerStats, step_seconds: float | None) -> None:
        self._owner._stats = stats
        if step_seconds is not None:
            for observer in self._owner.observers:
                observer.step_ended(step_seconds)

    def on_lost(self, streams: list[RequestStream]) -> None:
        for stream in streams:
            failed = Failed(
                "engine_error",
                "The engine failed over this request; its log has the reason. Retry the request.",
            )
            self._owner._push(stream, failed)

    def on_fatal(self, message: str) -> None:
        self._owner._fail(message)


def _resolve(reply: asyncio.Future[AnswerT], answer: AnswerT) -> None:
    if not reply.done():
        reply.set_result(answer)


def _reject(reply: asyncio.Future[Any], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)


def _prompt_tokens(request: GenerateRequest) -> int:
    if request.packed_token_ids is not None:
        return len(request.packed_token_ids) // TOKEN_BYTES
    return len(request.token_ids or ())
