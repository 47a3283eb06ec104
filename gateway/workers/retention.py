"""Retention hints on their way to workers: gathered for a moment, so that a hundred turns a second are two requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.workers.base import Worker, WorkerError
from gateway.workers.protocol import MAX_RETENTION_HINTS, RetentionHint

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.5
"""A tool is never back sooner than a hint that is this late is worth anything."""

_MAX_WORKERS = 4096


class RetentionHints:
    """Hints by worker. Use on one event loop. Those that cannot be delivered are dropped: they are worth nothing later."""

    def __init__(self, find: Callable[[str], Worker | None], *, gather: float = GATHER_SECONDS) -> None:
        """`find`: the worker of a name, None where there is none, or none that takes hints."""
        self._find = find
        self._gather = gather
        self._hints: dict[str, list[RetentionHint]] = {}
        self._sending: asyncio.Task[None] | None = None

    def add(self, worker: str, hint: RetentionHint) -> None:
        """Sends a hint soon."""
        hints = self._hints.setdefault(worker, [])
        if len(hints) >= MAX_RETENTION_HINTS or len(self._hints) > _MAX_WORKERS:
            return
        hints.append(hint)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def aclose(self) -> None:
        """Sends no more; idempotent."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._hints.clear()

    async def _send(self) -> None:
        while self._hints:
            await asyncio.sleep(self._gather)
            gathered, self._hints = self._hints, {}
            await asyncio.gather(*(self._deliver(worker, hints) for worker, hints in gathered.items()))

    async def _deliver(self, name: str, hints: Sequence[RetentionHint]) -> None:
        worker = self._find(name)
        if worker is None:
            return
        try:
            await worker.retain(hints)
        except WorkerError as error:
            log.debug("telling %s of sessions that wait: %s", name, error)
