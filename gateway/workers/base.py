"""What the gateway needs of a worker, whatever speaks behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from gateway.workers.protocol import Chunk, ErrorDetail, GenerateRequest, RetentionHint, WorkerInfo, WorkerStats
from prefix_cache.events import KVMessage


class WorkerError(Exception):
    """A worker did not do what it was asked."""


class WorkerUnavailableError(WorkerError):
    """Connection refused or lost, a 5xx, or an answer that makes no sense: another worker may do better.

    `reached` is False when no connection could be made; `retry_after` (seconds) is what the worker asked for, if it did.
    `busy` is True for an honest 429 or 503, which says nothing about the worker's health.
    """

    def __init__(self, message: str, *, reached: bool, busy: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reached = reached
        self.busy = busy
        self.retry_after = retry_after


class WorkerRefusedError(WorkerError):
    """The worker will not serve this request as it is (4xx); no other worker would. Says nothing about its health."""

    def __init__(self, status: int, detail: ErrorDetail) -> None:
        super().__init__(detail.message)
        self.status = status
        self.detail = detail


class ChunkStream(Protocol):
    """The answer to one request. Ends after Done or Failed; raises WorkerUnavailableError when it breaks off before, and
    WorkerRefusedError, as its first, where a worker looks at requests only after it has accepted them."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def __anext__(self) -> Chunk:
        """May be cancelled and called again; no chunk is lost."""

    def close(self) -> None:
        """Drops the connection at once, which aborts the request. Safe at any time, also while another task reads."""

    async def finish(self) -> None:
        """After Done or Failed: gives the connection back for other requests. Drops it when it is not fit for that."""


@runtime_checkable
class CountsTrouble(Protocol):
    """A worker whose KV events may be wrong in ways of their own."""

    @property
    def event_trouble(self) -> Mapping[str, int]:
        """How often what went wrong with its KV events, in a few fixed words."""


class Worker(Protocol):
    """Tokens in, tokens out. Every method raises WorkerUnavailableError when the worker cannot be reached."""

    @property
    def url(self) -> str: ...

    async def info(self) -> WorkerInfo: ...

    async def stats(self) -> WorkerStats: ...

    async def healthy(self) -> str | None:
        """None when it can generate, else its sentence why not."""

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        """Returns once the worker has accepted. Raises WorkerRefusedError, WorkerUnavailableError."""

    async def abort(self, request_id: str) -> bool: ...

    async def retain(self, hints: Sequence[RetentionHint]) -> int:
        """When sessions will be back, for a worker whose capabilities say `retention_hints`. How many it knows to wait."""

    async def supersede(self, digests: bytes) -> int:
        """These blocks (joined digests) may be given up before all others. How many of them it has."""

    def kv_events(self, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        """What happened after batch `after` of life `instance`, then what happens."""

    async def aclose(self) -> None: ...
