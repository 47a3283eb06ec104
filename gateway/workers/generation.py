"""A request in flight: sent to the worker the router chose, sent elsewhere while nothing has come of it, booked throughout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.router.route import Route
from gateway.turn import Receipt, TurnError
from gateway.workers.base import ChunkStream, WorkerError, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.books import Lease
from gateway.workers.member import Member
from gateway.workers.protocol import Chunk, Done, ErrorDetail, Failed, GenerateRequest, Started, Tokens

log = logging.getLogger(__name__)

_ABORT_SECONDS = 2.0
# The whole worker is going, not this request: what it could not begin, another can.
_WORKER_IS_GOING = frozenset({"shutting_down", "engine_failed"})
_PASSED_ON = frozenset({400, 413})


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the router sends an attempt, and its entry in the books."""

    member: Member
    route: Route
    lease: Lease


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a generation needs of the dispatcher. `place` raises TurnError when nobody is left outside the excluded names.

    `retried` is told the name of the worker that failed; `abort_later` sends an abort that nobody waits for; `generated`
    is told of a worker's new tokens.
    """

    place: Callable[[set[str]], Placement]
    retried: Callable[[str], None]
    abort_later: Callable[[Member, str], None]
    generated: Callable[[str, int], None]


class _Attempt:
    """One try on one worker. However it ends, `close` or one of its kind runs, and the books balance."""

    def __init__(self, placement: Placement, request_id: str) -> None:
        self.member = placement.member
        self.route = placement.route
        self.request_id = request_id
        self.stream: ChunkStream | None = None
        self.ended = False
        self._lease = placement.lease

    def accepted(self, stream: ChunkStream) -> None:
        self.stream = stream
        self.member.streams.add(stream)

    def started(self, chunk: Started) -> None:
        self._lease.cached(chunk.cached_tokens)
        self.route.started(chunk.cached_tokens, chunk.queue_seconds)
        self.member.succeeded()

    def first_token(self, cached_tokens: int) -> None:
        self._lease.running()
        self.route.computed(cached_tokens)

    def done(self, chunk: Done | Failed) -> None:
        """It came to its end; the stream can be given back."""
        self.ended = True
        if isinstance(chunk, Done):
            self.route.finished(chunk.prefill_seconds, chunk.decode_seconds)
        else:
            self.route.abandoned()
        self._release()

    def failed(self, error: WorkerUnavailableError) -> None:
        self.route.failed()
        self._release()
        self.member.failed(error)
        if self.stream is not None:
            self.stream.close()

    def abandon(self) -> None:
        """Ended from our side: the connection goes at once, and with it the request."""
        self.route.abandoned()
        self._release()
        if self.stream is not None:
            self.stream.close()

    def _release(self) -> None:
        self._lease.close()
        if self.stream is not None:
            self.member.streams.discard(self.stream)


class PooledGeneration:
    """A `gateway.turn.Generation`. `begin` it before use; one task at a time may wait in `started` or `chunks`."""

    def __init__(
        self, request: GenerateRequest, prompt_tokens: int, headers: Mapping[str, str], max_attempts: int, hooks: Hooks
    ) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._headers = dict(headers)
        self._max_attempts = max_attempts
        self._hooks = hooks
        self._attempt: _Attempt | None = None
        self._receipt: Receipt | None = None
        self._attempts = 0
        self._excluded: set[str] = set()
        self._last_error: WorkerUnavailableError | None = None
        self._started: Started | None = None
        self._unread: Chunk | None = None
        self._closed = False

    @property
    def receipt(self) -> Receipt:
        if self._receipt is None:
            raise RuntimeError("begin() was not called")
        return self._receipt

    async def begin(self) -> None:
        """Sends it, and returns when a worker has accepted it. Raises TurnError."""
        while True:
            attempt = self._next_attempt()
            request = self._request
            if attempt.request_id != request.request_id:
                request = msgspec.structs.replace(request, request_id=attempt.request_id)
            attempt.member.sent()
            try:
                stream = await attempt.member.client.generate(request, self._headers)
            except WorkerRefusedError as error:
                attempt.abandon()
                attempt.member.succeeded()
                raise _refusal(error) from error
            except WorkerUnavailableError as error:
                self._note_failure(attempt, error)
                continue
            except BaseException:
                # Cancelled half-way: the worker may or may not know of it.
                attempt.abandon()
                self._hooks.abort_later(attempt.member, attempt.request_id)
                raise
            attempt.accepted(stream)
            self._attempt = attempt
            return

    async def started(self) -> Started:
        while self._started is None:
            if self._closed:
                raise _closed_error()
            if self._attempt is None:
                await self.begin()
            attempt, stream = self._current()
            try:
                chunk = await anext(stream)
                if isinstance(chunk, Failed) and chunk.code in _WORKER_IS_GOING:
                    raise WorkerUnavailableError(f"worker {attempt.member.name}: {chunk.message}", reached=True, busy=True)
            except WorkerUnavailableError as error:
                if self._closed:
                    raise _closed_error() from error
                self._attempt = None
                self._note_failure(attempt, error)
                continue
            if not isinstance(chunk, Started):
                # Ended while it was still queued.
                self._unread = chunk
                chunk = Started(self._prompt_tokens, 0, 0.0)
            attempt.started(chunk)
            self._started = chunk
        return self._started

    async def chunks(self) -> AsyncIterator[Chunk]:
        started = await self.started()
        running = False
        while True:
            attempt, stream = self._current()
            chunk, self._unread = self._unread, None
            if chunk is None:
                try:
                    chunk = await anext(stream)
                except WorkerUnavailableError as error:
                    if self._closed:
                        raise _closed_error() from error
                    self._attempt = None
                    attempt.failed(error)
                    raise TurnError(
                        502,
                        "worker_lost",
                        f"Worker {attempt.member.name} was lost while it generated ({error}). Send the request again.",
                        retry_after=0.0,
                    ) from error
            attempt.member.heard()
            match chunk:
                case Tokens():
                    if not running:
                        running = True
                        attempt.first_token(started.cached_tokens)
                    self._hooks.generated(attempt.member.name, len(chunk.token_ids))
                case Done():
                    attempt.done(chunk)
                    yield chunk
                    return
                case Failed():
                    attempt.done(chunk)
                    raise _failure(attempt.member.name, chunk)
                case Started():
                    continue
            yield chunk

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        attempt, self._attempt = self._attempt, None
        if attempt is None or attempt.stream is None:
            return
        if attempt.ended:
            await attempt.stream.finish()
            return
        attempt.abandon()
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await attempt.member.client.abort(attempt.request_id)
        except (WorkerError, TimeoutError) as error:
            log.debug("aborting %s on %s: %s", attempt.request_id, attempt.member.name, error)

    def _next_attempt(self) -> _Attempt:
        if self._attempts >= self._max_attempts and self._last_error is not None:
            raise _exhausted(self._last_error, self._attempts)
        try:
            placement = self._hooks.place(self._excluded)
        except TurnError:
            if self._last_error is None:
                raise
            raise _exhausted(self._last_error, self._attempts) from self._last_error
        # Ids must differ between attempts: the one before may not have ended yet on a worker that is tried again.
        suffix = f".{self._attempts}" if self._attempts else ""
        self._attempts += 1
        self._receipt = placement.route.receipt
        return _Attempt(placement, self._request.request_id + suffix)

    def _note_failure(self, attempt: _Attempt, error: WorkerUnavailableError) -> None:
        attempt.failed(error)
        self._last_error = error
        self._excluded.add(attempt.member.name)
        self._hooks.retried(attempt.member.name)
        log.warning("request %s failed on %s before its first chunk: %s", self._request.request_id, attempt.member.name, error)

    def _current(self) -> tuple[_Attempt, ChunkStream]:
        attempt = self._attempt
        if attempt is None or attempt.stream is None:
            raise _closed_error()
        return attempt, attempt.stream


def _refusal(error: WorkerRefusedError) -> TurnError:
    detail: ErrorDetail = error.detail
    return TurnError(
        error.status if error.status in _PASSED_ON else 400, detail.code, detail.message, param=_param_of(detail.field)
    )


def _param_of(field: str | None) -> str | None:
    """The worker's field in the words of a client: sampling values bear the API's names, prompts do not."""
    if field is None or field in ("token_ids", "packed_token_ids"):
        return None
    return field.removeprefix("sampling.")


def _failure(worker: str, chunk: Failed) -> TurnError:
    if chunk.code in _WORKER_IS_GOING:
        return TurnError(503, chunk.code, f"Worker {worker}: {chunk.message}", retry_after=1.0)
    return TurnError(502, chunk.code, f"Worker {worker} could not finish the request: {chunk.message}")


def _exhausted(error: WorkerUnavailableError, attempts: int) -> TurnError:
    tried = "the worker" if attempts == 1 else f"{attempts} workers"
    if error.busy:
        return TurnError(
            503,
            "overloaded",
            f"No worker can take the request now: {error}. Try again later.",
            retry_after=error.retry_after if error.retry_after is not None else 1.0,
        )
    if not error.reached:
        return TurnError(503, "no_worker", f"Tried {tried} in vain: {error}. Try again shortly.", retry_after=1.0)
    return TurnError(502, "worker_failed", f"Tried {tried} in vain: {error}. Send the request again.", retry_after=1.0)


def _closed_error() -> TurnError:
    return TurnError(503, "aborted", "The generation was ended before its answer was complete.")
