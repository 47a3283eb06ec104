"""A response body of JSON values, one a line, decoded as it arrives."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import aiohttp
import msgspec

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.transport import describe

T = TypeVar("T")
MAX_LINE_BYTES = 64 * 2**20


class NdjsonStream(Generic[T]):
    """An asynchronous iterator over the lines of `response`. Ends where the body ends.

    Raises WorkerUnavailableError when the connection breaks, when a line is longer than `max_line` bytes or does not decode.
    Empty lines are skipped. At most one read's worth of lines is held; reading stops while nobody iterates.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, decoder: msgspec.json.Decoder[T], what: str, max_line: int = MAX_LINE_BYTES
    ) -> None:
        self._response = response
        self._decoder = decoder
        self._what = what
        self._max_line = max_line
        self._lines: deque[bytes] = deque()
        self._partial = bytearray()

    def __aiter__(self) -> NdjsonStream[T]:
        return self

    async def __anext__(self) -> T:
        while not self._lines:
            await self._read()
        line = self._lines.popleft()
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close()
            raise WorkerUnavailableError(
                f"{self._what} sent a line that is not of the protocol: {error}", reached=True
            ) from error

    async def _read(self) -> None:
        try:
            data = await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.close()
            raise WorkerUnavailableError(f"{self._what} broke off: {describe(error)}", reached=True) from error
        if not data:
            left, self._partial = bytes(self._partial), bytearray()
            if left.strip():
                self._lines.append(left)
                return
            raise StopAsyncIteration
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            whole = bytes(self._partial) + head if self._partial else head
            self._partial = bytearray(tail)
            self._lines.extend(line for line in whole.split(b"\n") if line.strip())
        else:
            self._partial += data
            if len(self._partial) > self._max_line:
                self.close()
                raise WorkerUnavailableError(f"{self._what} sent a line longer than {self._max_line} bytes", reached=True)

    async def finish(self) -> bool:
        """Waits for the end of the body, so that the connection can be used again. False when something else came."""
        try:
            return not self._lines and not self._partial and not await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def close(self) -> None:
        """Drops the connection at once; a read that waits in another task fails."""
        self._response.close()

    def release(self) -> None:
        """Gives the connection back; it is dropped unless the body has ended."""
        self._response.release()
