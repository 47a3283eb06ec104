"""A replica in this process that does what a test tells it to, over a real socket."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    AbortReply,
    AbortRequest,
    Capabilities,
    Done,
    ErrorDetail,
    ErrorReply,
    Finished,
    GenerateRequest,
    Started,
    SupersedeReply,
    SupersedeRequest,
    Tokens,
    WorkerInfo,
    WorkerStats,
)
from prefix_cache.event_log import EventLog

DROP = "drop"
"""In a script: cut the connection."""
HANG = "hang"
"""In a script: wait until the client leaves."""


@dataclass
class Wait:
    """In a script: wait for an event."""

    event: asyncio.Event


async def until(condition, seconds=3.0):
    """Waits for a condition; fails the test when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another party of the test
            await asyncio.sleep(0.005)


def answer(token_ids=(1, 2, 3), cached=0, prompt=0):
    """The chunks of a good answer."""
    return [
        Started(prompt, cached, 0.0),
        *(Tokens((token,)) for token in token_ids),
        Finished("stop"),
        Done(prompt, len(token_ids), cached, 0.0, 0.0, 0.0, 0),
    ]


def refusal(status, code="invalid_request", message="No.", field=None, headers=None):
    """In a script, alone: an answer other than 200."""
    return (status, ErrorReply(ErrorDetail(code, message, field)), headers or {})


@dataclass
class FakeReplica:
    model: str = "m"
    instance: str = "life-1"
    namespace: str = "00" * 16
    block_size: int = 4
    max_model_len: int = 1000
    vocab_size: int = 100
    max_concurrency: int = 8
    protocol_version: int = PROTOCOL_VERSION
    unhealthy: str | None = None
    frozen: bool = False
    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    scripts: list = field(default_factory=list)
    default: object = None
    requests: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    left: list = field(default_factory=list)
    superseded: list = field(default_factory=list)
    can_supersede: bool = True
    can_resume: bool = False
    can_gather: bool = False
    draining: bool = False
    blocks: dict = field(default_factory=dict)
    event_subscribers: int = 0
    drop_events: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.log = EventLog(self.instance)
        self.ended = asyncio.Event()
        self._runner = None

    async def start(self, path):
        """Serves on a unix socket; returns its URL."""
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/info", self._info),
                web.get("/v1/stats", self._stats),
                web.post("/v1/generate", self._generate),
                web.post("/v1/abort", self._abort),
                web.post("/v1/supersede", self._supersede),
                web.get("/v1/kv_events", self._kv_events),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()
        return f"unix:{path}"

    async def stop(self):
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _freeze(self):
        await until(lambda: not self.frozen, 60)

    async def _health(self, request):
        await self._freeze()
        if self.unhealthy:
            return _json(ErrorReply(ErrorDetail("starting", self.unhealthy)), 503)
        return web.json_response({"status": "ok"})

    async def _info(self, request):
        await self._freeze()
        return _json(
            WorkerInfo(
                protocol_version=self.protocol_version,
                instance=self.instance,
                model=self.model,
                namespace=self.namespace,
                block_size=self.block_size,
                num_blocks=100,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
                max_concurrency=self.max_concurrency,
                capabilities=Capabilities(supersede=self.can_supersede, resume=self.can_resume, gather=self.can_gather),
            )
        )

    async def _stats(self, request):
        await self._freeze()
        return _json(
            WorkerStats(
                instance=self.instance,
                running=self.running,
                waiting=self.waiting,
                waiting_prompt_tokens=self.waiting_prompt_tokens,
                num_blocks=100,
                free_blocks=100,
                cached_blocks=0,
                steps_total=0,
                prompt_tokens_total=0,
                cached_tokens_total=0,
                generated_tokens_total=0,
                preemptions_total=0,
                requests_total=0,
                aborted_total=0,
                draining=self.draining,
            )
        )

    async def _abort(self, request):
        body = msgspec.json.decode(await request.read(), type=AbortRequest)
        self.aborted.append(body.request_id)
        return _json(AbortReply(False))

    async def _supersede(self, request):
        self.superseded.append(msgspec.msgpack.decode(await request.read(), type=SupersedeRequest).digests)
        return _json(SupersedeReply(0))

    async def _generate(self, request):
        body = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        script = self.scripts.pop(0) if self.scripts else self.default
        if script is None:
            script = answer(prompt=len(body.packed_token_ids) // 4)
        if isinstance(script, tuple):
            return _json(script[1], script[0], script[2])
        response = None
        try:
            for step in script:
                if step == HANG:
                    await asyncio.Event().wait()
                elif step == DROP:
                    request.transport.abort()
                    return response or web.Response()
                elif isinstance(step, Wait):
                    await step.event.wait()
                else:
                    if response is None:
                        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
                        await response.prepare(request)
                    await response.write(step if isinstance(step, bytes) else msgspec.json.encode(step) + b"\n")
            await response.write_eof()
            self.ended.set()
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.left.append(body.request_id)
            raise

    async def _kv_events(self, request):
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        readable = asyncio.Event()
        after = request.query.get("after")
        place = self.log.subscribe(request.query.get("instance"), None if after is None else int(after), readable.set)
        self.event_subscribers += 1
        try:
            while not self.drop_events.is_set():
                await self._freeze()
                if place.needs_snapshot:
                    snapshot = self.log.snapshot({tier: b"".join(digests) for tier, digests in self.blocks.items()})
                    await response.write(msgspec.json.encode(snapshot) + b"\n")
                    place.give(snapshot)
                readable.clear()
                for batch in place.read(100):
                    await response.write(msgspec.json.encode(batch) + b"\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await readable.wait()
            request.transport.abort()
        finally:
            place.close()
            self.event_subscribers -= 1
        return response


def _json(value, status=200, headers=None):
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers)
