"""One try of a request on one worker."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.router.route import Route
from gateway.workers.base import ChunkStream, WorkerUnavailableError
from gateway.workers.books import Lease
from gateway.workers.member import Member
from gateway.workers.protocol import Done, Started


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the router sends an attempt, and its entry in the books."""

    member: Member
    route: Route
    lease: Lease


class Attempt:
    """One try on one worker. However it ends, `close` or one of its kind runs, and the books balance."""

    def __init__(self, placement: Placement, request_id: str) -> None:
        self.member = placement.member
        self.route = placement.route
        self.request_id = request_id
        self.stream: ChunkStream | None = None
        self.ended = False
        self.cached_tokens = 0
        self._lease = placement.lease
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def resumes(self) -> bool:
        """Whether what it began can be continued."""
        return self.member.info is not None and self.member.info.capabilities.resume

    @property
    def seconds(self) -> tuple[float, float]:
        """Spent on prefill and on decoding so far, as seen from here."""
        now = time.monotonic()
        if self._started_at is None:
            return 0.0, 0.0
        if self._first_token_at is None:
            return now - self._started_at, 0.0
        return self._first_token_at - self._started_at, now - self._first_token_at

    def accepted(self, stream: ChunkStream) -> None:
        self.stream = stream
        self.member.streams.add(stream)

    def started(self, chunk: Started) -> None:
        self._started_at = time.monotonic()
        self.cached_tokens = chunk.cached_tokens
        self._lease.cached(chunk.cached_tokens)
        self.route.started(chunk.cached_tokens, chunk.queue_seconds)
        self.member.began()

    def token(self) -> None:
        """A token has come; the first one counts."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._lease.running()
            self.route.computed(self.cached_tokens if self._started_at is not None else None)

    def done(self, last: Done | None = None, *, good: bool = True) -> None:
        """It came to its end, with these last words if any; the stream can be given back. `good` False: the worker said that it
        could not finish it."""
        self.ended = True
        if good:
            self.member.succeeded()
            self.route.finished(*((last.prefill_seconds, last.decode_seconds) if last is not None else ()))
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
