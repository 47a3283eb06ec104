"""A client of the worker protocol, for replicas of our own engine (docs/worker-protocol.md)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.exchange import BrokenExchangeError
from gateway.workers.exchanges import Exchanges
from gateway.workers.ndjson import NdjsonStream
from gateway.workers.prompt_request import wired
from gateway.workers.protocol import (
    AbortReply,
    AbortRequest,
    ErrorDetail,
    ErrorReply,
    GenerateRequest,
    RetainReply,
    RetainRequest,
    RetentionHint,
    SupersedeReply,
    SupersedeRequest,
    WorkerInfo,
    WorkerStats,
)
from gateway.workers.replica_stream import ReplicaStream
from gateway.workers.sent_prompts import SentPrompts
from gateway.workers.transport import (
    BUSY,
    MAX_REPLY_BYTES,
    NOT_THE_CLIENTS_FAULT,
    Patience,
    WorkerTransport,
    read_reply,
    seconds_to_wait,
)
from prefix_cache.events import KVMessage

T = TypeVar("T")
_KV_MESSAGES: msgspec.json.Decoder[KVMessage] = msgspec.json.Decoder(KVMessage)
_ERRORS = msgspec.json.Decoder(ErrorReply)


class ReplicaClient:
    """A `Worker` at `http://host:port` or `unix:PATH`. Make and use it on one event loop.

    `connect_timeout`: to open a connection. `reply_timeout`: for everything but generating. `accept_timeout`: from a request
    for generation to its acceptance, in which a large grammar may have to be compiled. All in seconds. `tls`: as of Exchanges.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        reply_timeout: float = 5.0,
        accept_timeout: float = 120.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = url
        self._reply_timeout = reply_timeout
        self._takes_prefixes = False
        self._gathers = False
        self._sent = SentPrompts()
        patience = Patience(connect_timeout, reply_timeout, accept_timeout)
        self._http = WorkerTransport(url, patience, tls=tls)
        self._exchanges = Exchanges(url, patience, tls)

    @property
    def url(self) -> str:
        return self._url

    async def info(self) -> WorkerInfo:
        info = await self._get("/v1/info", WorkerInfo)
        self._takes_prefixes = info.capabilities.prompt_prefixes
        self._gathers = info.capabilities.gather
        return info

    async def stats(self) -> WorkerStats:
        return await self._get("/v1/stats", WorkerStats)

    async def healthy(self) -> str | None:
        async with self._http.call("GET", "/health") as response:
            if response.status == 200:
                return None
            return (await _error_detail(response)).message

    async def abort(self, request_id: str) -> bool:
        body = msgspec.json.encode(AbortRequest(request_id))
        async with self._http.call("POST", "/v1/abort", body, {"Content-Type": "application/json"}) as response:
            return (await _decode(response, AbortReply)).aborted

    async def supersede(self, digests: bytes) -> int:
        body = msgspec.msgpack.encode(SupersedeRequest(digests))
        async with self._http.call("POST", "/v1/supersede", body, {"Content-Type": "application/msgpack"}) as response:
            return (await _decode(response, SupersedeReply)).marked

    async def retain(self, hints: Sequence[RetentionHint]) -> int:
        body = msgspec.msgpack.encode(RetainRequest(tuple(hints)))
        async with self._http.call("POST", "/v1/retain", body, {"Content-Type": "application/msgpack"}) as response:
            return (await _decode(response, RetainReply)).waiting

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        if request.gather and not self._gathers:
            request = msgspec.structs.replace(request, gather=0.0)
        short = self._sent.shortened(request) if self._takes_prefixes else request
        try:
            stream = await self._generate(short, headers)
        except WorkerRefusedError as error:
            # Forgotten; or a replica that knows of neither has taken the place of one that did.
            plain = msgspec.structs.replace(request, gather=0.0)
            newer = short is not request or "`gather`" in error.detail.message
            if not newer or error.detail.code not in ("unknown_prefix", "invalid_request", "malformed_body"):
                raise
            self._sent.forgotten(request)
            stream = await self._generate(plain, headers)
        if self._takes_prefixes:
            self._sent.accepted(request)
        return stream

    async def _generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        body = msgspec.msgpack.encode(wired(request))
        answer = await self._exchanges.post("/v1/generate", body, "application/msgpack", headers)
        if answer.status == 200:
            return ReplicaStream(answer, self._url)
        try:
            async with asyncio.timeout(self._reply_timeout):
                reply = bytearray()
                while len(reply) <= MAX_REPLY_BYTES and (data := await answer.read()):
                    reply += data
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self._url} answered {answer.status} and no reason", reached=True) from error
        except BrokenExchangeError as error:
            raise WorkerUnavailableError(f"worker {self._url} broke off its answer: {error}", reached=True) from error
        finally:
            answer.release()
        raise _as_error(answer.status, bytes(reply), answer.headers.get(b"retry-after", b"").decode("latin-1"), self._url)

    async def kv_events(self, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        query = {} if instance is None else {"instance": instance, "after": str(after)}
        try:
            async with asyncio.timeout(self._reply_timeout):
                response = await self._http.open("GET", str(URL("/v1/kv_events").with_query(query)), None, {})
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self._url} did not open its event stream in time", reached=True) from error
        try:
            if response.status != 200:
                raise await _response_error(response, self._url)
            async for message in NdjsonStream(response, _KV_MESSAGES, f"the event stream of worker {self._url}"):
                yield message
        finally:
            response.close()

    async def aclose(self) -> None:
        """Drops all connections; idempotent. Calls made afterwards fail."""
        self._exchanges.close()
        await self._http.aclose()

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self._http.call("GET", path) as response:
            return await _decode(response, kind)


async def _decode(response: aiohttp.ClientResponse, kind: type[T]) -> T:
    if response.status != 200:
        raise await _response_error(response, str(response.url))
    try:
        return msgspec.json.decode(await read_reply(response), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerUnavailableError(
            f"worker {response.url} gave an answer that is not of the protocol: {error}", reached=True
        ) from error


async def _error_detail(response: aiohttp.ClientResponse) -> ErrorDetail:
    return _detail(response.status, await read_reply(response))


def _detail(status: int, body: bytes) -> ErrorDetail:
    try:
        return _ERRORS.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorDetail("unknown", f"status {status}: {body[:200].decode('utf-8', 'replace').strip() or 'no reason'}")


async def _response_error(response: aiohttp.ClientResponse, url: str) -> WorkerRefusedError | WorkerUnavailableError:
    return _as_error(response.status, await read_reply(response), response.headers.get("Retry-After", ""), url)


def _as_error(status: int, body: bytes, retry_after: str, url: str) -> WorkerRefusedError | WorkerUnavailableError:
    """What an answer other than 200 means."""
    detail = _detail(status, body)
    if 400 <= status < 500 and status not in NOT_THE_CLIENTS_FAULT and status not in BUSY:
        return WorkerRefusedError(status, detail)
    return WorkerUnavailableError(
        f"worker {url}: {detail.message}",
        reached=True,
        busy=status in BUSY and detail.code != "engine_failed",
        retry_after=seconds_to_wait(retry_after),
    )
