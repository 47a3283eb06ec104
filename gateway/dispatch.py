"""The dispatcher: a turn's prompt goes to the worker the router chooses, and elsewhere when that one fails at once.

Implements `gateway.turn.Dispatcher`. Workers are added and removed while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.router.config import RouterConfig
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Generation, Prompt, SessionRef
from gateway.workers.protocol import SamplingParams, WorkerInfo


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of the worker pool; times are seconds.

    `models`: what the pool may serve, the default first; a worker with another model is kept apart. Empty: the model of
    the first worker. `aliases`: further names for them. `max_attempts`: workers tried for one turn.
    """

    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_attempts: int = 3
    retry_after: float = 2.0
    connect_timeout: float = 5.0
    poll_interval: float = 1.0
    probe_timeout: float = 5.0
    unresponsive_after: float = 30.0
    router: RouterConfig = field(default_factory=RouterConfig)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the pool sees it; `state` is starting, ready, down, mismatched."""

    name: str
    url: str
    state: str
    detail: str
    info: WorkerInfo | None
    in_flight: int
    queued_tokens: int
    indexed_blocks: int
    events_lag: float | None


class PoolDispatcher:
    """A `gateway.turn.Dispatcher` over a changing set of workers. Use on one event loop; `async with` starts and stops it."""

    def __init__(self, config: PoolConfig, telemetry: Telemetry | None = None) -> None: ...

    async def __aenter__(self) -> PoolDispatcher:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError

    def add_worker(self, name: str, url: str) -> None:
        """Starts looking after a worker at `http://host:port` or `unix:PATH`. An earlier one of that name is replaced."""
        raise NotImplementedError

    def remove_worker(self, name: str) -> None:
        """Forgets a worker; its turns in flight fail over or end with an error. Unknown names are ignored."""
        raise NotImplementedError

    def workers(self) -> Sequence[WorkerView]:
        raise NotImplementedError

    async def wait_ready(self, count: int, timeout: float | None = None) -> None:
        """Waits until `count` workers are ready. Raises TimeoutError."""
        raise NotImplementedError

    async def dispatch(
        self,
        *,
        request_id: str,
        model: str,
        session: SessionRef,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int,
        trace_headers: Mapping[str, str],
    ) -> Generation:
        raise NotImplementedError

    def pool_info(self, model: str) -> WorkerInfo:
        raise NotImplementedError

    def models(self) -> tuple[str, ...]:
        raise NotImplementedError
