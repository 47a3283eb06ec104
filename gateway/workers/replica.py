"""A client of the worker protocol, for replicas of our own engine (docs/worker-protocol.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.ndjson import NdjsonStream
from gateway.workers.protocol import (
    AbortReply,
    AbortRequest,
    Chunk,
    Done,
    ErrorDetail,
    ErrorReply,
    Failed,
    GenerateRequest,
    RetainReply,
    RetainRequest,
    RetentionHint,
    SupersedeReply,
    SupersedeRequest,
    WorkerInfo,
    WorkerStats,
)
from gateway.workers.sent_prompts import SentPrompts
from gateway.workers.transport import BUSY, NOT_THE_CLIENTS_FAULT, Patience, WorkerTransport, read_reply, retry_after
from prefix_cache.events import KVMessage

T = TypeVar("T")
_CHUNKS: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)
_KV_MESSAGES: msgspec.json.Decoder[KVMessage] = msgspec.json.Decoder(KVMessage)
_ERRORS = msgspec.json.Decoder(ErrorReply)
_END_OF_BODY_SECONDS = 0.5


class ReplicaClient:
    """A `Worker` at `http://host:port` or `unix:PATH`. Make and use it on one event loop.

    `connect_timeout`: to open a connection. `reply_timeout`: for everything but generating. `accept_timeout`: from a request
    for generation to its acceptance, in which a large grammar may have to be compiled. All in seconds.
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 5.0, reply_timeout: float = 5.0, accept_timeout: float = 120.0
    ) -> None:
        self._url = url
        self._reply_timeout = reply_timeout
        self._takes_prefixes = False
        self._sent = SentPrompts()
        self._http = WorkerTransport(url, Patience(connect_timeout, reply_timeout, accept_timeout))

    @property
    def url(self) -> str:
        return self._url

    async def info(self) -> WorkerInfo:
        info = await self._get("/v1/info", WorkerInfo)
        self._takes_prefixes = info.capabilities.prompt_prefixes
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
        short = self._sent.shortened(request) if self._takes_prefixes else request
        try:
            stream = await self._generate(short, headers)
        except WorkerRefusedError as error:
            # Forgotten; or a replica that knows of no prefixes has taken the place of one that did.
            if short is request or error.detail.code not in ("unknown_prefix", "invalid_request", "malformed_body"):
                raise
            self._sent.forgotten(request)
            stream = await self._generate(request, headers)
        if self._takes_prefixes:
            self._sent.accepted(request)
        return stream

    async def _generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        body = msgspec.msgpack.encode(request)
        response = await self._http.accept("/v1/generate", body, {**headers, "Content-Type": "application/msgpack"})
        if response.status == 200:
            return ReplicaStream(response, self._url)
        try:
            async with asyncio.timeout(self._reply_timeout):
                raise await _as_error(response, self._url)
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"worker {self._url} answered {response.status} and no reason", reached=True
            ) from error
        finally:
            response.release()

    async def kv_events(self, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        query = {} if instance is None else {"instance": instance, "after": str(after)}
        try:
            async with asyncio.timeout(self._reply_timeout):
                response = await self._http.open("GET", str(URL("/v1/kv_events").with_query(query)), None, {})
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self._url} did not open its event stream in time", reached=True) from error
        try:
            if response.status != 200:
                raise await _as_error(response, self._url)
            async for message in NdjsonStream(response, _KV_MESSAGES, f"the event stream of worker {self._url}"):
                yield message
        finally:
            response.close()

    async def aclose(self) -> None:
        """Drops all connections; idempotent. Calls made afterwards fail."""
        await self._http.aclose()

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self._http.call("GET", path) as response:
            return await _decode(response, kind)


class ReplicaStream:
    """The chunks of one accepted request. Ends after Done or Failed; raises WorkerUnavailableError if it breaks off before."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._lines = NdjsonStream(response, _CHUNKS, f"the stream of worker {url}")
        self._url = url
        self._ended = False

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._lines.__anext__()
        except StopAsyncIteration:
            self._lines.close()
            raise WorkerUnavailableError(f"the stream of worker {self._url} ended in the middle", reached=True) from None
        self._ended = isinstance(chunk, Done | Failed)
        return chunk

    def close(self) -> None:
        self._lines.close()

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(_END_OF_BODY_SECONDS):
                whole = self._ended and await self._lines.finish()
        except TimeoutError:
            whole = False
        if whole:
            self._lines.release()
        else:
            self._lines.close()


async def _decode(response: aiohttp.ClientResponse, kind: type[T]) -> T:
    if response.status != 200:
        raise await _as_error(response, str(response.url))
    try:
        return msgspec.json.decode(await read_reply(response), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerUnavailableError(
            f"worker {response.url} gave an answer that is not of the protocol: {error}", reached=True
        ) from error


async def _error_detail(response: aiohttp.ClientResponse) -> ErrorDetail:
    body = await read_reply(response)
    try:
        return _ERRORS.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorDetail(
            "unknown", f"status {response.status}: {body[:200].decode('utf-8', 'replace').strip() or 'no reason'}"
        )


async def _as_error(response: aiohttp.ClientResponse, url: str) -> WorkerRefusedError | WorkerUnavailableError:
    """What an answer other than 200 means."""
    status = response.status
    detail = await _error_detail(response)
    if 400 <= status < 500 and status not in NOT_THE_CLIENTS_FAULT and status not in BUSY:
        return WorkerRefusedError(status, detail)
    return WorkerUnavailableError(
        f"worker {url}: {detail.message}",
        reached=True,
        busy=status in BUSY and detail.code != "engine_failed",
        retry_after=retry_after(response),
    )
