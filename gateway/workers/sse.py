"""Server-sent events of a worker, as they arrive."""

from __future__ import annotations

import aiohttp

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.lines import BodyLines


class SseReader:
    """The data of the events in `response`: `data:` lines up to an empty line, joined. Comments and other fields are skipped.

    An event's data is bounded by `max_event` bytes. `what` names the stream in errors.
    """

    def __init__(self, response: aiohttp.ClientResponse, what: str, max_event: int) -> None:
        self.lines = BodyLines(response, what, max_event)
        self._what = what
        self._max_event = max_event
        self._data: list[bytes] = []
        self._size = 0

    async def read(self) -> bytes | None:
        """The data of the next event; None at the end of the body. Raises WorkerUnavailableError. Cancelling loses nothing."""
        while (line := await self.lines.read()) is not None:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                piece = line[5:].removeprefix(b" ")
                self._size += len(piece)
                if self._size > self._max_event:
                    self.lines.close()
                    raise WorkerUnavailableError(f"{self._what} sent an event over {self._max_event} bytes", reached=True)
                self._data.append(piece)
            elif not line and self._data:
                return self._take()
        return self._take() if self._data else None

    def _take(self) -> bytes:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data, self._size = [], 0
        return data
