"""A client of the worker protocol, for replicas of our own engine (docs/worker-protocol.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.ndjson import NdjsonStream, describe
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
from prefix_cache.events import KVMessage

T = TypeVar("T")
_CHUNKS: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)
_KV_MESSAGES: msgspec.json.Decoder[KVMessage] = msgspec.json.Decoder(KVMessage)
_ERRORS = msgspec.json.Decoder(ErrorReply)
_MAX_REPLY_BYTES = 2**20
_END_OF_BODY_SECONDS = 0.5
# Our own mistake or a worker that is none of ours: another worker may do better, and the client is not to blame.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 404, 405, 407, 408, 409, 415, 421, 425, 426, 431})
_BUSY = frozenset({429, 503})


class ReplicaClient:
    """A `Worker` at `http://host:port` or `unix:PATH`. Make and use it on one event loop.

    `connect_timeout`: to open a connection. `reply_timeout`: for everything but generating. `accept_timeout`: from a request
    for generation to its acceptance, in which a large grammar may have to be compiled. All in seconds.
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 5.0, reply_timeout: float = 5.0, accept_timeout: float = 120.0
    ) -> None:
        self._url = url
        self._base, self._socket_path = _parse_url(url)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        self._reply_timeout = reply_timeout
        self._accept_timeout = accept_timeout
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._takes_prefixes = False
        self._sent = SentPrompts()

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
        async with self._call("GET", "/health") as response:
            if response.status == 200:
                return None
            return (await _error_detail(response)).message

    async def abort(self, request_id: str) -> bool:
        body = msgspec.json.encode(AbortRequest(request_id))
        async with self._call("POST", "/v1/abort", body, {"Content-Type": "application/json"}) as response:
            return (await _decode(response, AbortReply)).aborted

    async def supersede(self, digests: bytes) -> int:
        body = msgspec.msgpack.encode(SupersedeRequest(digests))
        async with self._call("POST", "/v1/supersede", body, {"Content-Type": "application/msgpack"}) as response:
            return (await _decode(response, SupersedeReply)).marked

    async def retain(self, hints: Sequence[RetentionHint]) -> int:
        body = msgspec.msgpack.encode(RetainRequest(tuple(hints)))
        async with self._call("POST", "/v1/retain", body, {"Content-Type": "application/msgpack"}) as response:
            return (await _decode(response, RetainReply)).waiting

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        short = self._sent.shortened(request) if self._takes_prefixes else request
        try:
            stream = await self._generate(short, headers)
        except WorkerRefusedError as error:
            if short is request or error.detail.code != "unknown_prefix":
                raise
            self._sent.forgotten(request)
            stream = await self._generate(request, headers)
        if self._takes_prefixes:
            self._sent.accepted(request)
        return stream

    async def _generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        body = msgspec.msgpack.encode(request)
        sent = {**headers, "Content-Type": "application/msgpack"}
        try:
            async with asyncio.timeout(self._accept_timeout):
                response = await self._open("POST", "/v1/generate", body, sent)
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"worker {self._url} did not accept a request within {self._accept_timeout:g} s", reached=True
            ) from error
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
                response = await self._open("GET", str(URL("/v1/kv_events").with_query(query)), None, {})
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
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self._call("GET", path) as response:
            return await _decode(response, kind)

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A short exchange: bounded in time and closed properly."""
        response = None
        try:
            async with asyncio.timeout(self._reply_timeout):
                response = await self._open(method, path, body, headers or {})
                yield response
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"worker {self._url} did not answer {path} within {self._reply_timeout:g} s", reached=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnavailableError(f"worker {self._url}: {describe(error)}", reached=response is not None) from error
        finally:
            if response is not None:
                response.release()

    async def _open(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends a request and waits for the head of the answer."""
        url = URL(self._base + path, encoded=True)
        while True:
            session = self._open_session()  # each time: the worker may have been removed while the last try went on
            use = _ConnectionUse()
            try:
                return await session.request(
                    method, url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=use
                )
            except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError) as error:
                # A kept-alive connection that the worker closed just now says nothing about the worker. It is gone from
                # the idle ones, so this ends with a new connection at the latest.
                if not use.kept_alive:
                    raise WorkerUnavailableError(f"worker {self._url} hung up: {describe(error)}", reached=True) from error
            except aiohttp.ClientConnectorError as error:
                raise WorkerUnavailableError(
                    f"worker {self._url} cannot be reached: {describe(error)}", reached=False
                ) from error
            except (aiohttp.ClientConnectionError, OSError) as error:
                reached = not isinstance(error, aiohttp.ConnectionTimeoutError)
                raise WorkerUnavailableError(f"worker {self._url}: {describe(error)}", reached=reached) from error
            except aiohttp.ClientError as error:
                raise WorkerUnavailableError(f"worker {self._url} does not speak HTTP: {error}", reached=True) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise WorkerUnavailableError(f"worker {self._url} was removed", reached=False)
        if self._session is None:
            # Requests in flight are bounded by admission, not here: waiting for a connection would hide the queue.
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(self._socket_path, limit=0) if self._socket_path else aiohttp.TCPConnector(limit=0)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                trace_configs=[_kept_alive_tracing()],
            )
        return self._session


@dataclass(slots=True)
class _ConnectionUse:
    """Of one request."""

    kept_alive: bool = False


def _kept_alive_tracing() -> aiohttp.TraceConfig:
    async def reused(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
        context.trace_request_ctx.kept_alive = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


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


def _parse_url(url: str) -> tuple[str, str | None]:
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ValueError(f"worker address '{url}' has no path; write unix:/path/to/socket")
        return "http://worker", path
    try:
        parsed = URL(url)
    except ValueError as error:
        raise ValueError(f"worker address '{url}' is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"worker address '{url}' must be http://host:port or unix:/path/to/socket")
    return str(parsed).rstrip("/"), None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    try:
        async for data in response.content.iter_any():
            body += data
            if len(body) > _MAX_REPLY_BYTES:
                break
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerUnavailableError(f"worker {response.url} broke off its answer: {describe(error)}", reached=True) from error
    return bytes(body)


async def _decode(response: aiohttp.ClientResponse, kind: type[T]) -> T:
    if response.status != 200:
        raise await _as_error(response, str(response.url))
    try:
        return msgspec.json.decode(await _read(response), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerUnavailableError(
            f"worker {response.url} gave an answer that is not of the protocol: {error}", reached=True
        ) from error


async def _error_detail(response: aiohttp.ClientResponse) -> ErrorDetail:
    body = await _read(response)
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
    if 400 <= status < 500 and status not in _NOT_THE_CLIENTS_FAULT and status not in _BUSY:
        return WorkerRefusedError(status, detail)
    return WorkerUnavailableError(
        f"worker {url}: {detail.message}",
        reached=True,
        busy=status in _BUSY and detail.code != "engine_failed",
        retry_after=_retry_after(response.headers.get("Retry-After")),
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header; dates and nonsense count as absent."""
    try:
        seconds = float(value) if value is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds <= 3600 else None
