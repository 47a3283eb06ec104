"""Connections within limits: how many there are, how long their headers may take, and how large those may be.

Between requests a connection belongs to nobody: when there are too many, the one that has been idle for longest makes way for
a new one, and those that never had a request before those of clients who had. Ten thousand of them that say nothing, or say it
byte by byte, so keep nobody out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_server import Server

from gateway.config import HttpConfig

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_FULL_BODY = (
    b'{"error":{"message":"The gateway has as many connections as it takes, and all of them are in use. Try again shortly.",'
    b'"type":"service_unavailable_error","param":null,"code":"too_many_connections"}}'
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_TOO_LARGE_BODY = (
    b'{"error":{"message":"The headers of the request are larger than this gateway takes (http.max_header_bytes).",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)


class Connections:
    """All connections of one server, and the factory of their protocols. `refused`, `evicted`, `slow`: since the start."""

    def __init__(self, server: Server, config: HttpConfig, **options: Any) -> None:
        """`options`: of aiohttp's RequestHandler."""
        self._server = server
        self._options = options
        self.config = config
        self._open = 0
        self._silent: OrderedDict[LimitedHandler, None] = OrderedDict()
        self._resting: OrderedDict[LimitedHandler, None] = OrderedDict()
        self.refused = self.evicted = self.slow = 0

    def __len__(self) -> int:
        return self._open

    def __call__(self) -> LimitedHandler:
        return LimitedHandler(self, self._server, **self._options)

    def opened(self) -> bool:
        """A connection was made; False when there is no room for it."""
        limit = self.config.max_connections
        if limit and self._open >= limit:
            idle = self._silent or self._resting
            if not idle:
                self.refused += 1
                return False
            self.evicted += 1
            idle.popitem(last=False)[0].give_up()
        self._open += 1
        return True

    def closed(self, handler: LimitedHandler) -> None:
        """It is gone."""
        self._open -= 1
        self.busy(handler)

    def idle(self, handler: LimitedHandler, *, served: bool) -> None:
        """It waits for a request; from now on it may have to make way. `served`: it had one before."""
        (self._resting if served else self._silent)[handler] = None

    def busy(self, handler: LimitedHandler) -> None:
        """It has a request, or is gone."""
        self._silent.pop(handler, None)
        self._resting.pop(handler, None)


class LimitedHandler(RequestHandler):
    """aiohttp's protocol of one connection, which tells `Connections` whether it is idle.

    `_expecting`: no request is here or on its way to a handler, so what comes are headers.
    """

    __slots__ = ("_admitted", "_connections", "_expecting", "_header_bytes", "_header_timer")

    def __init__(self, connections: Connections, server: Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        self._admitted = False
        self._expecting = False
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._connections.opened():
            if isinstance(transport, asyncio.WriteTransport):
                transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
            transport.close()
            return
        self._admitted = True
        super().connection_made(transport)
        self._expect(served=False)
        # A connection must bring its first request; between requests it may rest for `idle_timeout`.
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        super().data_received(data)
        if not self._expecting:
            return
        if self._messages:
            self._got_headers()
            return
        self._header_bytes += len(data)
        if self._header_timer is None and data:
            self._start_timer()
        if self._header_bytes > self._connections.config.max_header_bytes and self.transport is not None:
            self.transport.write(_TOO_LARGE % (len(_TOO_LARGE_BODY), _TOO_LARGE_BODY))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._admitted:
            return
        self._admitted = self._expecting = False
        self._no_timer()
        self._connections.closed(self)
        super().connection_lost(exc)

    async def _handle_request(self, request: BaseRequest, *args: Any) -> tuple[web.StreamResponse, bool]:
        self._got_headers()
        try:
            return await super()._handle_request(request, *args)
        finally:
            # With the rest of a body still to come, what follows are no headers.
            if self._admitted and not self._messages and request.content.is_eof():
                self._expect(served=True)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What cannot be read as HTTP gets an error of the same shape as any other request's."""
        response = super().handle_error(request, status, exc, message)
        if isinstance(exc, LineTooLong):
            response = web.Response(status=431, body=_TOO_LARGE_BODY, content_type="application/json")
        elif isinstance(exc, BadHttpMessage):
            why = (message or "it cannot be parsed").splitlines()[0].rstrip(":. ")
            error = {
                "message": f"This is no valid HTTP request: {why[:200]}.",
                "type": "invalid_request_error",
                "param": None,
                "code": "malformed_request",
            }
            response = web.Response(status=400, body=orjson.dumps({"error": error}), content_type="application/json")
        response.force_close()
        return response

    def give_up(self) -> None:
        """Closes a connection that is idle."""
        self.force_close()

    def _expect(self, *, served: bool) -> None:
        self._expecting = True
        self._header_bytes = 0
        self._connections.idle(self, served=served)

    def _got_headers(self) -> None:
        self._expecting = False
        self._no_timer()
        self._connections.busy(self)

    def _start_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._connections.config.header_timeout, self._too_slow)

    def _no_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if self._expecting:
            self._connections.slow += 1
            self.force_close()
