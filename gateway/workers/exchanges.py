"""Requests for generation to one replica, over connections that are kept open between them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from yarl import URL

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.exchange import BrokenExchangeError, Connection
from gateway.workers.tls import worker_tls
from gateway.workers.transport import Patience, describe, parse_url

_IDLE_SECONDS = 15.0
_MAX_IDLE = 256
_HAPPY_EYEBALLS_SECONDS = 0.25


class Exchanges:
    """Of a worker at `http://host:port[/path]` or `unix:PATH`. Use on one event loop.

    As many connections as there are exchanges at once: admission bounds those, and waiting for one would hide the queue.
    """

    def __init__(self, url: str, patience: Patience, tls: ssl.SSLContext | None = None) -> None:
        """tls: for https; None: as the system trusts. Raises ValueError for an address that is none."""
        base, self._socket_path = parse_url(url)
        self._url = url
        self._parsed = URL(base)
        self._prefix = self._parsed.raw_path.rstrip("/")
        host = self._parsed.raw_host or ""
        port = "" if self._parsed.is_default_port() else f":{self._parsed.port}"
        self._host_header = (f"[{host}]" if ":" in host else host) + port
        self._tls = (tls or worker_tls(None)) if self._parsed.scheme == "https" else None
        self._patience = patience
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, path: str, body: bytes, content_type: str, headers: Mapping[str, str]) -> Connection:
        """Sends a request and waits for the head of the answer, whatever its status. Raises WorkerUnavailableError."""
        request = self._head(path, len(body), content_type, headers) + body
        loop = asyncio.get_running_loop()
        while True:
            connection = self._take() or await self._connect()
            self._open.add(connection)
            connection.send(request)
            # Cheaper than asyncio.timeout, of which nothing else is needed here.
            alarm = loop.call_later(self._patience.accept, connection.fail, _TOO_LATE)
            try:
                await connection.head()
            except BrokenExchangeError as error:
                self._open.discard(connection)
                message = str(error)
                if message is _TOO_LATE:
                    raise WorkerUnavailableError(
                        f"worker {self._url} did not accept a request within {self._patience.accept:g} s", reached=True
                    ) from error
                if self._closed:
                    raise self._removed() from error
                # A connection that the worker closed just now, or that its predecessor held, says nothing about the worker.
                # It is gone from the idle ones, so this ends with a new connection at the latest.
                if not (error.silent and connection.used > 1):
                    raise WorkerUnavailableError(f"worker {self._url} hung up: {message}", reached=True) from error
            except BaseException:
                self.drop(connection)
                raise
            else:
                return connection
            finally:
                alarm.cancel()

    def drop(self, connection: Connection) -> None:
        """Ends an exchange, and its connection with it."""
        self._open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Drops all connections; idempotent. Requests made afterwards fail."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connection in (*self._open, *self._idle):
            connection.close()
        self._open.clear()
        self._idle.clear()

    def _head(self, path: str, length: int, content_type: str, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host_header}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {length}\r\n"
        ]
        for name, value in headers.items():
            if not (name.isascii() and value.isprintable()):
                raise ValueError(f"header {name!r} holds what no header may")
            lines.append(f"{name}: {value}\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1", "replace")

    def _take(self) -> Connection | None:
        if self._closed:
            raise self._removed()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience.connect):
                if self._socket_path is not None:
                    _, connection = await loop.create_unix_connection(self._make, self._socket_path)
                else:
                    _, connection = await loop.create_connection(
                        self._make,
                        self._parsed.host or "",
                        self._parsed.port or 80,
                        ssl=self._tls,
                        happy_eyeballs_delay=_HAPPY_EYEBALLS_SECONDS,
                    )
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"worker {self._url} cannot be reached: no connection within {self._patience.connect:g} s", reached=False
            ) from error
        except OSError as error:
            raise WorkerUnavailableError(f"worker {self._url} cannot be reached: {describe(error)}", reached=False) from error
        if self._closed:
            connection.close()
            raise self._removed()
        return connection

    def _make(self) -> Connection:
        return Connection(self._returned)

    def _returned(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._closed or len(self._idle) >= _MAX_IDLE:
            connection.close()
            return
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Closes what has been idle for long. The list is in the order in which they came back."""
        loop = asyncio.get_running_loop()
        horizon = loop.time() - _IDLE_SECONDS
        kept = []
        for connection in self._idle:
            if connection.usable and connection.idle_since > horizon:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        self._sweeping = loop.call_later(_IDLE_SECONDS, self._sweep) if kept else None

    def _removed(self) -> WorkerUnavailableError:
        return WorkerUnavailableError(f"worker {self._url} was removed", reached=False)


_TOO_LATE = "it did not answer in time"
