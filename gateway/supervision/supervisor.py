"""Keeps N local replica processes alive, and says clearly why one died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.supervision.config import CommandFor, SupervisorConfig


class ReplicaStartError(Exception):
    """A replica died again and again before it was ever healthy. The message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica that answers /health: `url` is `unix:PATH`, new at every start."""

    name: str
    number: int
    url: str
    pid: int


class Supervisor:
    """Starts, watches, restarts and stops replicas. `on_up` and `on_down` are called on the event loop.

    `async with Supervisor(...) as s: await s.ready()` raises ReplicaStartError when a replica cannot be started.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        command_for: CommandFor,
        *,
        on_up: Callable[[ReplicaUp], None],
        on_down: Callable[[str], None],
    ) -> None: ...

    async def __aenter__(self) -> Supervisor:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError

    async def ready(self) -> None:
        """Waits until every replica is up once. Raises ReplicaStartError."""
        raise NotImplementedError

    async def failed(self) -> None:
        """Runs until a replica is given up, then raises ReplicaStartError; otherwise until cancelled."""
        raise NotImplementedError
