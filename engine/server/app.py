"""The replica's HTTP application: one handler a path of docs/worker-protocol.md."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from aiohttp import web

from engine.core import RequestRefused
from engine.server.bodies import check_generate, decode, read_body
from engine.server.config import ServerConfig
from engine.server.metrics import CONTENT_TYPE, EngineMetrics
from engine.server.prompt_memory import PromptMemory
from engine.server.replies import errors_as_replies, json_reply, refusal
from engine.server.retention import WaitingTable
from engine.server.stream import RequestStream
from engine.server.vllm.token_book import TokenBook
from engine.thread import EngineThread, Unavailable
from gateway.workers.protocol import (
    MAX_RETENTION_HINTS,
    AbortReply,
    AbortRequest,
    Chunk,
    Done,
    Failed,
    GenerateRequest,
    RetainReply,
    RetainRequest,
    SupersedeReply,
    SupersedeRequest,
)
from prefix_cache.event_log import Subscription
from prefix_cache.events import KVMessage
from prefix_cache.hashing import DIGEST_BYTES, JoinedDigests

logger = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"

_ABORT_BODY = 64 * 1024
_RETAIN_BODY = 8 * 2**20
_EVENT_BATCHES = 256  # written at a time
_TRACE_HEADERS = ("traceparent", "tracestate")


class ReplicaApp:
    """Serves an `EngineThread` once one is attached; until then everything but /health is refused with `starting`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._engine: EngineThread | None = None
        self._metrics: EngineMetrics | None = None
        self._encoder = msgspec.json.Encoder()
        self._closing = False
        self._wakes: set[asyncio.Event] = set()
        self._prompts = PromptMemory(config.prompt_memory)
        self._book: TokenBook | None = None
        self.waiting = WaitingTable()
        self.app = web.Application(middlewares=[errors_as_replies])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/info", self._info),
                web.get("/v1/stats", self._stats),
                web.post("/v1/generate", self._generate),
                web.post("/v1/abort", self._abort),
                web.post("/v1/supersede", self._supersede),
                web.post("/v1/retain", self._retain),
                web.get("/v1/retain", self._waiting_sessions),
                web.get("/v1/kv_events", self._kv_events),
                web.get("/metrics", self._render_metrics),
            ]
        )

    def attach(self, engine: EngineThread, book: TokenBook | None = None) -> None:
        """From now on requests go to `engine`, which has been started. `book` is told of their prompts."""
        self._book = book
        self._metrics = EngineMetrics(engine, self.waiting)
        engine.observers.append(self._metrics)
        self._engine = engine

    def end_subscriptions(self) -> None:
        """Ends all KV event streams, and takes no more."""
        self._closing = True
        for wake in self._wakes:
            wake.set()

    def _ready_engine(self) -> EngineThread:
        if self._engine is None:
            raise Unavailable("starting", "The model is still being loaded; ask /health when it is ready.", 1.0)
        return self._engine

    async def _health(self, request: web.Request) -> web.StreamResponse:
        engine = self._ready_engine()
        wrong = engine.health()
        if wrong is not None:
            return refusal("engine_failed" if engine.is_accepting else "shutting_down", wrong)
        info = engine.info
        startup = {} if info.startup is None else {"startup": info.startup}
        return json_reply({"status": "ok", "instance": info.instance, "model": info.model, **startup})

    async def _info(self, request: web.Request) -> web.StreamResponse:
        return json_reply(self._ready_engine().info)

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        return json_reply(self._ready_engine().stats())

    async def _render_metrics(self, request: web.Request) -> web.StreamResponse:
        self._ready_engine()
        text = b"" if self._metrics is None else self._metrics.render()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        engine = self._ready_engine()
        body = await read_body(request, _ABORT_BODY, self._config.body_timeout)
        return json_reply(AbortReply(await engine.abort(decode(request, body, AbortRequest).request_id)))

    async def _supersede(self, request: web.Request) -> web.StreamResponse:
        engine = self._ready_engine()
        limit = 2 * DIGEST_BYTES * engine.info.num_blocks + _ABORT_BODY
        body = await read_body(request, limit, self._config.body_timeout)
        joined = decode(request, body, SupersedeRequest).digests
        if len(joined) % DIGEST_BYTES:
            message = f"digests take {DIGEST_BYTES} bytes each; {len(joined)} bytes are no whole number of them."
            raise RequestRefused("invalid_request", message, "digests")
        return json_reply(SupersedeReply(await engine.supersede(JoinedDigests(joined))))

    async def _retain(self, request: web.Request) -> web.StreamResponse:
        engine = self._ready_engine()
        body = await read_body(request, _RETAIN_BODY, self._config.body_timeout)
        hints = decode(request, body, RetainRequest).hints
        if len(hints) > MAX_RETENTION_HINTS:
            message = f"{len(hints)} hints came at once; send at most {MAX_RETENTION_HINTS}."
            raise RequestRefused("invalid_request", message, "hints")
        for hint in hints:
            self.waiting.told(hint)
        engine.retain(hints)
        return json_reply(RetainReply(len(self.waiting)))

    async def _waiting_sessions(self, request: web.Request) -> web.StreamResponse:
        self._ready_engine()
        return json_reply(self.waiting.shown())

    async def _submitted(
        self, engine: EngineThread, wanted: GenerateRequest, arrived: float, trace_headers: Mapping[str, str]
    ) -> RequestStream:
        if self._book is None or engine.knows(wanted.request_id):
            return await engine.submit(wanted, arrived, trace_headers)
        self._book.began(wanted)
        try:
            return await engine.submit(wanted, arrived, trace_headers)
        except BaseException:
            self._book.forget(wanted.request_id)
            raise

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        engine = self._ready_engine()
        engine.check_available()
        body = await read_body(request, self._config.body_limit(engine.info.max_model_len), self._config.body_timeout)
        wanted = decode(request, body, GenerateRequest)
        del body
        check_generate(wanted)
        wanted = self._prompts.whole(wanted)
        self.waiting.returned(wanted.tenant, wanted.session)
        trace_headers = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
        stream = await self._submitted(engine, wanted, arrived, trace_headers)
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        try:
            if not await _begin(request, response):
                return response
            async with _streaming(request, response, self._config.write_timeout):
                while chunks := await stream.read():
                    await self._write(request, response, chunks, last=isinstance(chunks[-1], Done | Failed))
            return response
        finally:
            # Wherever this ends early (the client left, it reads nothing, the server stops), the engine drops the request.
            await stream.aclose()

    async def _kv_events(self, request: web.Request) -> web.StreamResponse:
        engine = self._ready_engine()
        if self._closing:
            raise Unavailable("shutting_down", "This replica is shutting down; use another one.", 1.0)
        if engine.events.subscribers >= self._config.max_subscribers:
            message = f"{self._config.max_subscribers} KV event streams are open, as many as this replica serves; close one."
            raise Unavailable("too_many_subscribers", message, self._config.heartbeat)
        wake = asyncio.Event()
        subscription = engine.events.subscribe(request.query.get("instance"), _after(request), wake.set)
        self._wakes.add(wake)
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        try:
            if not await _begin(request, response):
                return response
            async with _streaming(request, response, self._config.write_timeout):
                await self._send_events(request, response, engine, subscription, wake)
            return response
        finally:
            subscription.close()
            self._wakes.discard(wake)

    async def _send_events(
        self,
        request: web.Request,
        response: web.StreamResponse,
        engine: EngineThread,
        subscription: Subscription,
        wake: asyncio.Event,
    ) -> None:
        silent = True  # the first answer comes at once, be it that there is nothing new
        while not self._closing:
            messages: Sequence[KVMessage]
            if subscription.needs_snapshot:
                snapshot = await engine.snapshot()
                subscription.give(snapshot)
                messages = (snapshot,)
            else:
                wake.clear()
                messages = subscription.read(_EVENT_BATCHES)
                if not messages and silent:
                    messages = (engine.events.heartbeat(),)
            if messages:
                await self._write(request, response, messages)
                silent = False
                # What several steps changed is read at once; the router knows anyhow what it has sent where.
                await asyncio.sleep(self._config.event_gather)
            else:
                silent = not await _woken(wake, self._config.heartbeat)

    async def _write(
        self, request: web.Request, response: web.StreamResponse, values: Sequence[Chunk | KVMessage], *, last: bool = False
    ) -> None:
        """One line a value, in one piece, and with the last ones the end of the answer: a gateway that waits for it cannot use
        the connection again. A reader that takes nothing for too long is disconnected."""
        lines = bytearray()
        for value in values:
            self._encoder.encode_into(value, lines, -1)
            lines += b"\n"
        async with _time_to_take(request, self._config.write_timeout):
            await (response.write_eof(bytes(lines)) if last else response.write(bytes(lines)))


@contextlib.asynccontextmanager
async def _time_to_take(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """Around one write: disconnects a reader that takes nothing for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        logger.warning("%s: the client took nothing for %g seconds", request.path, seconds)
        _cut(request)
        raise ConnectionResetError("the client reads nothing") from error


async def _begin(request: web.Request, response: web.StreamResponse) -> bool:
    """Sends status and headers. False when the client is gone already, and nobody is left to answer."""
    try:
        await response.prepare(request)
    except ConnectionError as error:
        logger.debug("%s: the client left before the answer began: %s", request.path, error)
        return False
    return True


@contextlib.asynccontextmanager
async def _streaming(request: web.Request, response: web.StreamResponse, write_timeout: float) -> AsyncIterator[None]:
    """The rest of a streamed response that has begun. What goes wrong in it cannot be answered any more: the connection is
    cut."""
    try:
        yield
        async with _time_to_take(request, write_timeout):
            await response.write_eof()
    except ConnectionError as error:
        logger.debug("%s: the connection is gone: %s", request.path, error)
    except Unavailable as error:
        logger.warning("%s: the stream is cut: %s", request.path, error)
        _cut(request)
    except Exception:
        logger.exception("%s: the stream is cut", request.path)
        _cut(request)


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _after(request: web.Request) -> int | None:
    text = request.query.get("after")
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        message = f"after is the number of the last batch seen, 0 or more; {text[:40]!r} is none."
        raise RequestRefused("invalid_request", message, "after")
    return int(text)


async def _woken(wake: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return False
    return True
