"""Server-sent events to one client: kept alive while there is nothing to say, given up when the client takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"
_LOW_WATER = 2**14
"""Below asyncio's own mark, under which a transport has not paused its writer, or lets it go on."""


class ClientGoneError(Exception):
    """The client closed the connection, or took nothing for too long."""


def frame(data: Any) -> bytes:
    """One event whose data is the JSON of `data`."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream:
    """An answer in events. At most two high-water marks of a socket's buffer are held for a slow client: `send` waits."""

    def __init__(self, request: web.Request, *, write_timeout: float) -> None:
        self._request = request
        self._write_timeout = write_timeout
        self._loop = asyncio.get_running_loop()
        self._last_write = 0.0
        self.delivered = False
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Sends status and headers. Raises ClientGoneError."""
        self.response.headers.update(headers)
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGoneError("the client left before the answer began") from error
        self._last_write = self._loop.time()

    @property
    def is_open(self) -> bool:
        """Status and headers were sent: what goes wrong now can only be told in the stream."""
        return self.response.prepared

    @property
    def idle(self) -> float:
        """Seconds since something was sent."""
        return self._loop.time() - self._last_write

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Sends bytes, once the client has taken enough of what came before. Raises ClientGoneError.

        `last`: the answer is complete with these, so that a client which has them may hang up at any moment: `delivered` is
        true from here on, also where its hanging up cancels this very call.
        """
        if not data:
            return
        self.delivered = last
        try:
            await self._write(data)
        except ClientGoneError:
            self.delivered = False
            raise

    async def _write(self, data: bytes) -> None:
        try:
            if self._is_taken_at_once(len(data)):
                await self.response.write(data)
            else:
                async with asyncio.timeout(self._write_timeout):
                    await self.response.write(data)
        except TimeoutError as error:
            raise ClientGoneError(f"the client read nothing for {self._write_timeout:g} seconds") from error
        except ConnectionError as error:
            raise ClientGoneError("the client closed the connection") from error
        self._last_write = self._loop.time()

    def _is_taken_at_once(self, length: int) -> bool:
        """Whether so many bytes can be written without waiting: the socket's buffer is below its low-water mark and stays
        there. A timer for each token costs more than all else that is done to send it."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() + length < _LOW_WATER

    def drop(self) -> None:
        """Ends the connection without another byte. It cancels the request's handler, so nothing may be left to do there."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def close(self) -> None:
        """Ends the body. Raises ClientGoneError."""
        try:
            if self._is_taken_at_once(0):
                await self.response.write_eof()
            else:
                async with asyncio.timeout(self._write_timeout):
                    await self.response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            raise ClientGoneError("the client closed the connection") from error
