"""What streams of foreign workers share: events in, chunks out, and an end that gives the connection back."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import aiohttp
import msgspec

from gateway.workers.base import WorkerRefusedError, WorkerUnavailableError
from gateway.workers.protocol import Chunk, ErrorDetail
from gateway.workers.sse import SseReader
from gateway.workers.transport import BUSY, NOT_THE_CLIENTS_FAULT

_END_OF_BODY_SECONDS = 0.5

NO_ERROR = msgspec.Raw(b"null")
"""For fields that are absent where nothing went wrong: msgspec takes no union of Raw and None."""


class SseChunks(ABC):
    """A `ChunkStream` over server-sent events. `max_event`: bytes of one. Times are measured from here, by `clock`."""

    def __init__(
        self, response: aiohttp.ClientResponse, url: str, max_event: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = SseReader(response, f"the stream of worker {url}", max_event)
        self._url = url
        self._clock = clock
        self._accepted_at = clock()
        self._first_at: float | None = None
        self._ready: deque[Chunk] = deque()
        self._ended = False

    def __aiter__(self) -> SseChunks:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            data = await self._reader.read()
            if data is None:
                raise self._broken("ended in the middle")
            if data.strip() == b"[DONE]":
                self._done()
            else:
                self._take(data)
        return self._ready.popleft()

    def close(self) -> None:
        self._reader.lines.close()

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(_END_OF_BODY_SECONDS):
                whole = self._ended and await self._reader.lines.finish()
        except TimeoutError:
            whole = False
        if whole:
            self._reader.lines.release()
        else:
            self._reader.lines.close()

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Appends the chunks of one event to `_ready`. Raises WorkerUnavailableError, WorkerRefusedError."""

    @abstractmethod
    def _done(self) -> None:
        """The last event has come: appends Done. Raises WorkerUnavailableError where the answer is not complete."""

    def _failed(self, status: int, message: str, param: str | None) -> WorkerRefusedError | WorkerUnavailableError:
        """What an error among the events means."""
        self.close()
        if self._first_at is None and is_refusal(status):
            # Accepted with a 200, looked at only then: nothing has been generated, and no other of its kind would take it.
            return WorkerRefusedError(status, error_detail(message, param))
        return WorkerUnavailableError(f"worker {self._url} broke off its answer: {message}", reached=True, busy=status in BUSY)

    def _broken(self, how: str) -> WorkerUnavailableError:
        self.close()
        return WorkerUnavailableError(f"the stream of worker {self._url} {how}", reached=True)


def is_refusal(status: int) -> bool:
    """True for an answer that another worker would give as well."""
    return 400 <= status < 500 and status not in NOT_THE_CLIENTS_FAULT and status not in BUSY


class _ErrorBody(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


_ERROR_BODIES = msgspec.json.Decoder(_ErrorBody)


def error_parts(raw: msgspec.Raw, message: str, code: int | str | None, status: int = 500) -> tuple[int, str, str | None]:
    """Status, sentence and parameter of an error in OpenAI's shape, or in the older flat one. `status`: where it names none."""
    param = None
    if bytes(raw) != b"null":
        try:
            body = _ERROR_BODIES.decode(raw)
            message, code, param = body.message or message, body.code if body.code is not None else code, body.param
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = message or bytes(raw)[:200].decode("utf-8", "replace")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    return status, message[:2000] or "no reason given", param


def error_detail(message: str, param: str | None) -> ErrorDetail:
    """A refusal in the words of the worker protocol."""
    lowered = message.lower()
    if param == "input_tokens" or "context length" in lowered:
        return ErrorDetail("context_length_exceeded", message)
    if param is not None and param.startswith("structured_outputs"):
        return ErrorDetail("invalid_grammar", message, "grammar")
    return ErrorDetail("invalid_request", message, param)


class _FlatError(msgspec.Struct):
    error: msgspec.Raw = NO_ERROR
    message: str = ""


_ERRORS = msgspec.json.Decoder(_FlatError)


def error_of(raw: bytes) -> tuple[str, str | None]:
    """Sentence and parameter in the body of an error, whatever it is."""
    try:
        body = _ERRORS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _FlatError(message=raw[:200].decode("utf-8", "replace").strip())
    _, message, param = error_parts(body.error, body.message, None)
    return message, param
