"""The gateway's listening socket."""

from __future__ import annotations

import errno
import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.app import MAX_HEADER_BYTES
from gateway.config import HttpConfig


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


class HttpServer:
    """Serves an application on one TCP address. `async with` starts it, and ends it gracefully: no new connections, then
    up to `shutdown_timeout` seconds for the turns in flight.

    A handler whose client leaves is cancelled at once; that is what aborts its generation.
    """

    def __init__(self, app: web.Application, config: HttpConfig) -> None:
        self._config = config
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=config.shutdown_timeout,
            access_log=None,
            logger=log,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            keepalive_timeout=75.0,
        )
        self._port = config.port

    @property
    def port(self) -> int:
        """The port it listens on, also where 0 was asked for."""
        return self._port

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = self._config.host
        if host in ("0.0.0.0", "", "::"):
            host = "127.0.0.1"
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def __aenter__(self) -> HttpServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port, backlog=1024)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ListenError(_why(self._config, error)) from error
        for address in self._runner.addresses:
            if isinstance(address, tuple):
                self._port = address[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()


def _why(config: HttpConfig, error: OSError | OverflowError) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"Port {config.port} on {config.host} is in use. Choose another with --port (0 takes a free one)."
    if number == errno.EACCES:
        return f"Port {config.port} needs privileges that this process does not have. Choose one above 1023 with --port."
    if isinstance(error, socket.gaierror) or number == errno.EADDRNOTAVAIL:
        return f"{config.host!r} is no address of this machine. Choose another with --host (0.0.0.0 for all of them)."
    return f"Cannot listen on {config.host}:{config.port}: {error}."
