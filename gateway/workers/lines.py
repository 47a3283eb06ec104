"""A response body line by line, in bounded memory."""

from __future__ import annotations

from collections import deque

import aiohttp

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.transport import describe


class BodyLines:
    """Reads `response` as lines that end with a newline; the last one may go without. One task at a time may wait in `read`.

    At most one read's worth of lines and `max_line` bytes of an unfinished one are held; reading stops while nobody asks.
    `what` names the body in errors.
    """

    def __init__(self, response: aiohttp.ClientResponse, what: str, max_line: int) -> None:
        self._response = response
        self._what = what
        self._max_line = max_line
        self._lines: deque[bytes] = deque()
        self._partial = bytearray()

    async def read(self) -> bytes | None:
        """The next line, without its newline. None at the end of the body.

        Raises WorkerUnavailableError when the connection breaks or a line is too long. Cancelling it loses nothing.
        """
        while not self._lines:
            try:
                data = await self._response.content.readany()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.close()
                raise WorkerUnavailableError(f"{self._what} broke off: {describe(error)}", reached=True) from error
            if not data:
                left, self._partial = bytes(self._partial), bytearray()
                return left or None
            head, newline, tail = data.rpartition(b"\n")
            if newline:
                whole = bytes(self._partial) + head if self._partial else head
                self._partial = bytearray(tail)
                self._lines.extend(whole.split(b"\n"))
            else:
                self._partial += data
            if len(self._partial) > self._max_line:
                self._too_long()
        line = self._lines.popleft()
        if len(line) > self._max_line:
            self._too_long()
        return line

    async def finish(self) -> bool:
        """Waits for the end of the body, so that the connection can be used again. False when something else came."""
        try:
            return not any(map(bytes.strip, self._lines)) and not self._partial and not await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def close(self) -> None:
        """Drops the connection at once; a read that waits in another task fails."""
        self._response.close()

    def release(self) -> None:
        """Gives the connection back; it is dropped unless the body has ended."""
        self._response.release()

    def _too_long(self) -> None:
        self.close()
        raise WorkerUnavailableError(f"{self._what} sent a line longer than {self._max_line} bytes", reached=True)
