"""A response body of JSON values, one a line, decoded as it arrives."""

from __future__ import annotations

from typing import Generic, TypeVar

import aiohttp
import msgspec

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.lines import BodyLines

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
        self._lines = BodyLines(response, what, max_line)
        self._decoder = decoder
        self._what = what

    def __aiter__(self) -> NdjsonStream[T]:
        return self

    async def __anext__(self) -> T:
        line = await self._lines.read()
        while line is not None and not line.strip():
            line = await self._lines.read()
        if line is None:
            raise StopAsyncIteration
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close()
            raise WorkerUnavailableError(
                f"{self._what} sent a line that is not of the protocol: {error}", reached=True
            ) from error

    async def finish(self) -> bool:
        """Waits for the end of the body, so that the connection can be used again. False when something else came."""
        return await self._lines.finish()

    def close(self) -> None:
        """Drops the connection at once; a read that waits in another task fails."""
        self._lines.close()

    def release(self) -> None:
        """Gives the connection back; it is dropped unless the body has ended."""
        self._lines.release()
