"""The chunks of one request on their way from the engine thread to whoever reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from gateway.workers.protocol import Chunk, Done, Failed, Finished, GenerateRequest, Started, TokenLogprob, Tokens


class ChunkBuffer:
    """Chunks that wait to be read. What several steps produced for one choice is merged.

    Holds at most one Started, per choice one run of tokens and one Finished, and one end, however slow the reader is; the
    token ids themselves are bounded by the request's own `max_tokens`. The order within a choice is kept.
    """

    def __init__(self) -> None:
        self._started: Started | None = None
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._finished: list[Finished] = []
        self._end: Done | Failed | None = None

    def push(self, chunk: Chunk) -> None:
        """Adds a chunk."""
        if isinstance(chunk, Tokens):
            held = self._token_ids.get(chunk.index)
            if held is None:
                self._token_ids[chunk.index] = list(chunk.token_ids)
            else:
                held.extend(chunk.token_ids)
            if chunk.logprobs:
                self._logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
        elif isinstance(chunk, Started):
            self._started = chunk
        elif isinstance(chunk, Finished):
            self._finished.append(chunk)
        else:
            self._end = chunk

    def take(self) -> list[Chunk]:
        """Everything that waits, in an order a reader may see; empties the buffer."""
        chunks: list[Chunk] = []
        if self._started is not None:
            chunks.append(self._started)
            self._started = None
        if self._token_ids:
            for index, token_ids in self._token_ids.items():
                chunks.append(Tokens(tuple(token_ids), index, tuple(self._logprobs.get(index, ()))))
            self._token_ids = {}
            self._logprobs = {}
        if self._finished:
            chunks.extend(self._finished)
            self._finished = []
        if self._end is not None:
            chunks.append(self._end)
            self._end = None
        return chunks

    def __bool__(self) -> bool:
        return bool(self._started is not None or self._token_ids or self._finished or self._end is not None)


class RequestStream:
    """One accepted request, seen from the event loop: its chunks, and how far it has come.

    An asynchronous iterator of chunks; `read` gives all that wait at once. Leaving it early needs `aclose`, which aborts the
    request. Times are seconds on the monotonic clock: `arrived` when it was submitted, `first_token_at` and `last_token_at`
    when the step that produced the token ended.
    """

    def __init__(
        self,
        request: GenerateRequest,
        arrived: float,
        on_close: Callable[[RequestStream], None],
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.choices = request.sampling.n
        self._finished_before = frozenset(index for index, choice in enumerate(request.resume) if choice.finished)
        self.session = request.session
        self.arrived = arrived
        self.trace_headers: Mapping[str, str] = {} if trace_headers is None else trace_headers
        self.started: Started | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.completion_tokens = 0
        self.finished: dict[int, Finished] = {}
        self.end: Done | Failed | None = None
        self.closed = False
        self._buffer = ChunkBuffer()
        self._readable = asyncio.Event()
        self._gather = request.gather
        self._over = asyncio.Event()
        self._first_read = False
        self._exhausted = False
        self._unread: list[Chunk] = []
        self._on_close = on_close

    @property
    def ended(self) -> bool:
        """True once its last chunk is known, read or not."""
        return self.end is not None

    def push(self, chunk: Chunk, at: float) -> None:
        """Adds a chunk of the step that ended at `at`. Nothing is added after the end, or for a reader that has gone."""
        if self.ended or self.closed:
            return
        if isinstance(chunk, Tokens):
            self.completion_tokens += len(chunk.token_ids)
            self.last_token_at = at
            if self.first_token_at is None:
                self.first_token_at = at
        elif isinstance(chunk, Started):
            self.started = chunk
            self.started_at = at
        elif isinstance(chunk, Finished):
            self.finished[chunk.index] = chunk
        else:
            self.end = chunk
            self._over.set()
        self._buffer.push(chunk)
        self._readable.set()

    def push_abort(self, at: float) -> None:
        """Ends it as the protocol says for a request that was aborted: the open choices and Done, with what is known here."""
        for index in range(self.choices):
            if index not in self.finished and index not in self._finished_before:
                self.push(Finished("abort", index), at)
        started_at = at if self.started_at is None else self.started_at
        first_token_at = at if self.first_token_at is None else self.first_token_at
        self.push(
            Done(
                prompt_tokens=0 if self.started is None else self.started.prompt_tokens,
                completion_tokens=self.completion_tokens,
                cached_tokens=0 if self.started is None else self.started.cached_tokens,
                queue_seconds=at - self.arrived if self.started is None else self.started.queue_seconds,
                prefill_seconds=max(first_token_at - started_at, 0.0),
                decode_seconds=max(at - first_token_at, 0.0),
                preemptions=0,
            ),
            at,
        )

    async def read(self) -> list[Chunk]:
        """All chunks that wait, or the next ones. Empty when the last one was read before, or the stream was closed.

        What comes after the first token waits for more where the request allows it, up to the end of the answer.
        """
        while not self._buffer:
            if self._exhausted or self.closed:
                return []
            self._readable.clear()
            await self._readable.wait()
        if self._gather and not self._over.is_set():
            if self._first_read:
                await self._wait(self._over)
            elif self.first_token_at is None:
                self._readable.clear()
                await self._wait(self._readable)
        self._first_read = self.first_token_at is not None
        chunks = self._buffer.take()
        self._exhausted = self.ended
        return chunks

    async def _wait(self, event: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._gather):
                await event.wait()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Chunk:
        if not self._unread:
            self._unread = (await self.read())[::-1]
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.pop()

    async def aclose(self) -> None:
        """Ends it; idempotent. A request that has not ended is aborted: the engine drops it before its next step."""
        if not self.closed:
            self.closed = True
            self._readable.set()
            self._over.set()
            self._on_close(self)
