"""What the replica server needs of an engine. The real one and the simulated one both are an `EngineCore`.

Threads: `prepare` may be called from any thread, also while a step runs (it is where grammars compile). Everything else is
called from one thread, the engine thread. This file imports neither torch nor the server, so that a simulated replica
starts in no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.workers.protocol import Chunk, GenerateRequest, RetentionHint, WorkerInfo, WorkerStats
from prefix_cache.events import KVEvent
from prefix_cache.hashing import BlockHash

PreparedT = TypeVar("PreparedT")


class RequestRefused(Exception):  # noqa: N818 - it is an answer, not an error of the engine
    """A request that can never be served as it is. Becomes a 4xx with an ErrorReply.

    `code` is one of docs/worker-protocol.md, `message` a sentence with the remedy, `field` the path of what is wrong.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class EngineCore(Protocol[PreparedT]):
    """A step-driven engine. One call of `step` runs one batch and returns what it produced, in order."""

    @property
    def info(self) -> WorkerInfo:
        """What this engine is; constant during its life."""

    def prepare(self, request: GenerateRequest) -> PreparedT:
        """Checks a request and does its slow, batch-independent work. Raises RequestRefused."""

    def add(self, prepared: PreparedT) -> None:
        """Queues a prepared request. Raises RequestRefused when its id is already in use."""

    def abort(self, request_id: str) -> bool:
        """Drops a request at once and gives its blocks back; no more chunks come. False when it is not known."""

    def has_work(self) -> bool:
        """True when a `step` would do something."""

    def step(self) -> list[tuple[str, Chunk]]:
        """Runs one step. A failure of one request becomes its Failed chunk; other requests go on."""

    def stats(self) -> WorkerStats:
        """Load and totals now."""

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call, in order."""

    def snapshot(self) -> dict[str, bytes]:
        """Tier -> joined digests of every block that can be found now (events not yet taken are included)."""

    def supersede(self, digests: Sequence[BlockHash]) -> int:
        """These blocks will not be asked for again: they are evicted before all others. Returns how many there are."""

    def retain(self, hints: Sequence[RetentionHint]) -> None:
        """What gateways say of sessions between two turns. An engine may ignore it."""

    def check_integrity(self) -> None:
        """Raises prefix_cache.block_pool.IntegrityError when the books of the block pool do not balance."""
