"""HTTP/1.1 to a replica, one exchange at a time on a connection.

Every turn begins with such an exchange, and a general HTTP client takes longer for it than the router for its decision:
it makes a request object, a response object, a stream, timers and traces, none of which is needed between two programs that
know each other. Parsing is llhttp's (httptools); the rest is what is left when only this use is meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

HIGH_WATER_BYTES = 2**16
"""Of a body that nobody has read: reading from the socket stops until somebody does."""


class BrokenExchangeError(Exception):
    """The connection broke, or what came is no HTTP. `silent`: before anything of the answer came; then a connection that was
    used before says nothing about the worker, which may have closed it just now."""

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class Connection(asyncio.Protocol):
    """One connection. `send`, then `head`, then `read` until it returns b"", and again. One task at a time."""

    def __init__(self, returned: Callable[[Connection], None]) -> None:
        """`returned` is told when an exchange has ended so that another may follow."""
        self._returned = returned
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._body: list[bytes] = []
        self._buffered = 0
        self._error: BrokenExchangeError | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._busy = False
        self._heard = False
        self._keep = False
        self._sized = False
        self.status = 0
        """Of the answer; 0 until its head is here."""
        self.headers: dict[bytes, bytes] = {}
        """Of the answer, names in lower case."""
        self.complete = False
        """The answer is here from its first byte to its last, read or not."""
        self.used = 0
        """Exchanges that were begun on it."""
        self.idle_since = 0.0
        """When the last one ended, in seconds of the loop's clock."""

    @property
    def usable(self) -> bool:
        """Whether an exchange can begin on it."""
        return self._error is None and not self._busy and self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> None:
        """Begins an exchange: head and body of the request as bytes."""
        if not self.usable or self._transport is None:
            raise RuntimeError("this connection cannot be used")
        self._busy = True
        self._heard = self._keep = self._sized = self.complete = False
        self.status = 0
        self.headers = {}
        self.used += 1
        self._transport.write(request)

    async def head(self) -> None:
        """Waits until `status` and `headers` are known. Raises BrokenExchangeError."""
        while not self.status:
            await self._more()

    def fail(self, message: str) -> None:
        """Ends the exchange: whoever waits, or asks later, gets BrokenExchangeError."""
        self._broken(message)
        self._drop()

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; b"" after its end. Raises BrokenExchangeError, once all that came is
        read. Cancelling it loses nothing."""
        while not self._body:
            if self.complete:
                self._free()
                return b""
            await self._more()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self, within: float = 0.0) -> None:
        """The caller has what it wanted. The connection is used again if the answer has ended, or does so within so many
        seconds without another byte of its body; else it is dropped."""
        if self._body:
            self.close()
        elif self.complete:
            self._free()
        elif within and self._error is None:
            self._ending = self._loop.call_later(within, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Drops the connection at once, which the other side takes for an abort; idempotent."""
        self._broken("it was closed")
        self._drop()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of a TCP or unix socket, so it is one

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if not self._busy:
            self.fail("it spoke without being asked")
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"it does not speak HTTP: {error}")
        if self._ending is not None and (self.complete or self._body):
            self._ending.cancel()
            self._ending = None
            self.release()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and not self._sized and exc is None and self._busy:
            # A body without a length ends with its connection.
            self.complete = True
            self._keep = False
        if not self.complete:
            self._broken(str(exc) or type(exc).__name__ if exc is not None else "the connection was closed")
        self._drop()
        self._wake()

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) < 100:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None:
            return
        status = parser.get_status_code()
        if status < 200:
            self.headers = {}  # an interim answer
            return
        self.status = status
        self._sized = b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._buffered += len(data)
        if self._buffered > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status and self._parser is not None:
            self.complete = True
            self._keep = self._parser.should_keep_alive()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _broken(self, message: str) -> None:
        if self._error is None:
            self._error = BrokenExchangeError(message, silent=not self._heard)

    def _free(self) -> None:
        """After an exchange that came to its end."""
        if not self._busy:
            return
        self._busy = False
        if self._keep and self._error is None:
            self.idle_since = self._loop.time()
            self._returned(self)
        else:
            self.close()

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._parser = None  # they refer to each other
        if transport is not None:
            transport.abort()
        self._wake()
