"""HTTP to one worker: connections, time limits, and what goes wrong told as WorkerErrors."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.tls import tls_trouble

MAX_REPLY_BYTES = 2**20
# An honest answer that says nothing about the worker's health.
BUSY = frozenset({429, 503})
# Our own mistake or a worker that is none of ours: another worker may do better, and the client is not to blame.
NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 404, 405, 407, 408, 409, 415, 421, 425, 426, 431})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker is waited for, in seconds. `connect`: to open a connection. `reply`: for everything but generating.
    `accept`: from a request for generation to its acceptance, in which a large grammar may have to be compiled. `idle`:
    between two pieces of an answer, for workers whose silence nobody else watches; None: for ever."""

    connect: float = 5.0
    reply: float = 5.0
    accept: float = 120.0
    idle: float | None = None


@dataclass(slots=True)
class _ConnectionUse:
    """Of one request."""

    kept_alive: bool = False


class WorkerTransport:
    """Requests to a worker at `http://host:port[/path]` or `unix:PATH`. Make and use it on one event loop.

    `headers` go with every request (credentials, mostly). Every method raises WorkerUnavailableError.
    """

    def __init__(
        self, url: str, patience: Patience, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """tls: for https; None: as the system trusts. Raises ValueError for an address that is none."""
        self.url = url
        self.patience = patience
        self._base, self._socket_path = parse_url(url)
        self._headers = dict(headers or {})
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def aclose(self) -> None:
        """Drops all connections; idempotent. Calls made afterwards fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A short exchange: bounded in time (`timeout`, else the patience for replies) and closed properly."""
        limit = self.patience.reply if timeout is None else timeout
        response = None
        try:
            async with asyncio.timeout(limit):
                response = await self.open(method, path, body, headers or {})
                yield response
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self.url} did not answer {path} within {limit:g} s", reached=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnavailableError(f"worker {self.url}: {describe(error)}", reached=response is not None) from error
        finally:
            if response is not None:
                response.release()

    async def accept(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends a request for generation and waits for the head of the answer, whatever its status."""
        try:
            async with asyncio.timeout(self.patience.accept):
                return await self.open("POST", path, body, headers)
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"worker {self.url} did not accept a request within {self.patience.accept:g} s", reached=True
            ) from error

    async def open(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends a request and waits for the head of the answer."""
        url = URL(self._base + path, encoded=True)
        while True:
            session = self._open_session()  # each time: the worker may have been removed while the last try went on
            use = _ConnectionUse()
            try:
                return await session.request(
                    method,
                    url,
                    data=body,
                    headers={**headers, **self._headers},
                    allow_redirects=False,
                    trace_request_ctx=use,
                )
            except aiohttp.ClientConnectorError as error:
                raise WorkerUnavailableError(
                    f"worker {self.url} cannot be reached: {describe(error)}", reached=False
                ) from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError, BrokenPipeError) as error:
                # A kept-alive connection that the worker closed just now, or that its predecessor held, says nothing about the
                # worker. It is gone from the idle ones, so this ends with a new connection at the latest.
                if not use.kept_alive:
                    raise WorkerUnavailableError(f"worker {self.url} hung up: {describe(error)}", reached=True) from error
            except (aiohttp.ClientConnectionError, OSError) as error:
                reached = not isinstance(error, aiohttp.ConnectionTimeoutError)
                raise WorkerUnavailableError(f"worker {self.url}: {describe(error)}", reached=reached) from error
            except aiohttp.ClientError as error:
                raise WorkerUnavailableError(f"worker {self.url} does not speak HTTP: {error}", reached=True) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise WorkerUnavailableError(f"worker {self.url} was removed", reached=False)
        if self._session is None:
            # Requests in flight are bounded by admission, not here: waiting for a connection would hide the queue.
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(self._socket_path, limit=0)
                if self._socket_path
                else aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.patience.connect, sock_read=self.patience.idle),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                trace_configs=[_kept_alive_tracing()],
            )
        return self._session


def _kept_alive_tracing() -> aiohttp.TraceConfig:
    async def reused(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
        context.trace_request_ctx.kept_alive = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


def parse_url(url: str) -> tuple[str, str | None]:
    """The base of a worker's URLs, and its socket where it has one. Raises ValueError."""
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


async def read_reply(response: aiohttp.ClientResponse, limit: int = MAX_REPLY_BYTES) -> bytes:
    """The body of a short answer; what is beyond `limit` bytes is left. Raises WorkerUnavailableError when it breaks off."""
    body = bytearray()
    try:
        async for data in response.content.iter_any():
            body += data
            if len(body) > limit:
                break
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerUnavailableError(f"worker {response.url} broke off its answer: {describe(error)}", reached=True) from error
    return bytes(body)


def retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds of a Retry-After header; dates and nonsense count as absent."""
    return seconds_to_wait(response.headers.get("Retry-After", ""))


def seconds_to_wait(value: str) -> float | None:
    """What a Retry-After header says, in seconds; dates and nonsense count as absent."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= 3600 else None


def describe(error: BaseException) -> str:
    """An error of the transport in words; some have an empty message."""
    return tls_trouble(error) or str(error) or type(error).__name__
