"""The gateway's listening socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.certificate import Certificate
from gateway.config import HttpConfig
from gateway.connections import Connections
from gateway.vanished import notice_the_vanished


class ListenError(Exception):
    """The address cannot be listened on. The message says why and what to change."""


def _as_remarks(record: logging.LogRecord) -> bool:
    """What does not parse as HTTP (scanners, TLS to a plain port) is no error of ours: one line for it, no traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg = f"{record.msg}: it is not HTTP: %s"
        record.args = (*(record.args if isinstance(record.args, tuple) else ()), " ".join(error.message.split())[:200])
        record.exc_info = None
    return True


log = logging.getLogger(__name__)
log.addFilter(_as_remarks)


_READ_AHEAD = 2**18
"""Bytes of a body that wait for its handler, as many as one read of the socket brings: with less, reading stops and begins
again for every such piece of a long conversation."""

_VANISHED_AFTER = 10.0
"""Seconds later than a client is given up that is there and reads nothing: to the system the two look alike, and it counts from
when the client's buffer is full, not from when ours is."""


class _Site(web.BaseSite):
    """A listening socket whose connections are made by a factory of ours."""

    def __init__(self, runner: web.AppRunner, listen: Callable[[], Awaitable[asyncio.AbstractServer]], name: str) -> None:
        super().__init__(runner)
        self._listen = listen
        self._shown = name

    @property
    def name(self) -> str:
        return self._shown

    async def start(self) -> None:
        await super().start()
        self._server = await self._listen()


class HttpServer:
    """Serves an application on one TCP address. `async with` starts it, and ends it gracefully: no new connections, then
    up to `shutdown_timeout` seconds for the turns in flight.

    A handler whose client leaves is cancelled at once; that is what aborts its generation. `reuse_port`: other processes
    serve the same port. `tls` False: plain HTTP, whatever the settings say. `connections` knows how many there are.
    `options`: how the names of the options begin that set its address.
    """

    def __init__(
        self, app: web.Application, config: HttpConfig, *, reuse_port: bool = False, tls: bool = True, options: str = "--"
    ) -> None:
        self._config = config
        self._options = options
        self._reuse_port = reuse_port
        self._certificate: Certificate | None = None
        if tls and config.tls_cert is not None and config.tls_key is not None:
            self._certificate = Certificate(Path(config.tls_cert), Path(config.tls_key))
        self._following: asyncio.Task[None] | None = None
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=config.shutdown_timeout, access_log=None, logger=log
        )
        self._port = config.port
        self.connections: Connections | None = None

    @property
    def port(self) -> int:
        """The port it listens on, also where 0 was asked for."""
        return self._port

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        scheme = "http" if self._certificate is None else "https"
        host = self._config.host
        if host in ("0.0.0.0", "", "::"):
            host = "127.0.0.1"
        return f"{scheme}://[{host}]:{self._port}" if ":" in host else f"{scheme}://{host}:{self._port}"

    async def __aenter__(self) -> HttpServer:
        """Raises ListenError, TlsError."""
        context = self._certificate.load() if self._certificate is not None else None
        await self._runner.setup()
        site = _Site(self._runner, lambda: self._listen(context), self.url)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ListenError(why_not(self._config.host, self._config.port, error, self._options)) from error
        for address in self._runner.addresses:
            if isinstance(address, tuple):
                self._port = address[1]
        if self._certificate is not None:
            self._following = asyncio.create_task(self._certificate.follow())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._runner.cleanup()

    async def _listen(self, context: ssl.SSLContext | None) -> asyncio.AbstractServer:
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner was not set up")
        config = self._config
        self.connections = Connections(
            server,
            config,
            logger=log,
            access_log=None,
            read_bufsize=_READ_AHEAD,
            max_line_size=config.max_header_bytes,
            max_field_size=config.max_header_bytes,
            keepalive_timeout=config.idle_timeout,
        )
        listening = await asyncio.get_running_loop().create_server(
            self.connections,
            config.host,
            config.port,
            backlog=1024,
            reuse_port=self._reuse_port or None,
            ssl=context,
            ssl_handshake_timeout=config.header_timeout if context is not None else None,
        )
        notice_the_vanished(listening.sockets, config.write_timeout + _VANISHED_AFTER)
        return listening


def why_not(host: str, port: int, error: OSError | OverflowError, options: str = "--") -> str:
    """A sentence for an address that cannot be listened on, with the remedy. `options`: how the names of those begin that set
    it."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use. Choose another with {options}port (0 takes a free one)."
    if number == errno.EACCES:
        return f"Port {port} needs privileges that this process does not have. Choose one above 1023 with {options}port."
    if isinstance(error, socket.gaierror) or number == errno.EADDRNOTAVAIL:
        return f"{host!r} is no address of this machine. Choose another with {options}host (0.0.0.0 for all of them)."
    return f"Cannot listen on {host}:{port}: {error}."
