"""A trace through the gateway's router over simulated replicas, event by event on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.route import Route
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import EventBatch, Snapshot
from prefix_cache.index import ResidencyIndex
from traces.fleet.replica import Changes, Job, SimulatedReplica, StepCosts
from traces.importers.blocks import BlockRequest, BlockSession, BlockTrace


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`blocks`: of each replica. `window`: seconds over which the sessions of a closed-loop trace begin; `pace`: their gaps,
    and the times of an open-loop trace, are divided by it. `event_delay`: seconds until the gateway hears of a block."""

    replicas: int = 8
    blocks: int = 1000
    costs: StepCosts = field(default_factory=StepCosts)
    window: float = 600.0
    pace: float = 1.0
    event_delay: float = 0.005
    seed: int = 1


@dataclass(slots=True)
class Turn:
    """How one request went. Seconds, tokens."""

    arrived: float
    worker: str
    reason: str
    request: BlockRequest
    cached_tokens: int = 0
    promised_tokens: int = 0
    estimated: float = 0.0
    time_to_first_token: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetRun:
    """`turns` in the order in which they came. `busy`: share of the time that the replicas were computing."""

    turns: list[Turn]
    seconds: float
    busy: float
    router: Router

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens."""
        return sum(turn.cached_tokens for turn in self.turns) / sum(turn.request.prompt_tokens for turn in self.turns)

    def time_to_first_token(self, quantile: float) -> float:
        """Seconds."""
        times = sorted(turn.time_to_first_token for turn in self.turns)
        return times[min(int(quantile * len(times)), len(times) - 1)]


class FleetSimulation:
    """One run. Everything is decided by the trace, the configurations and the seed."""

    def __init__(self, trace: BlockTrace, fleet: FleetConfig, router: RouterConfig) -> None:
        self._trace = trace
        self._fleet = fleet
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._replicas = {
            name: SimulatedReplica(name, fleet.blocks, trace.block_size, fleet.costs)
            for name in (f"replica-{number}" for number in range(fleet.replicas))
        }
        self._index = ResidencyIndex(max(router.max_indexed_blocks, 4 * fleet.blocks * fleet.replicas))
        self._router = Router(router, self._index, lambda: self._now)
        self._sequence = dict.fromkeys(self._replicas, 0)
        for name in self._replicas:
            self._index.apply(name, Snapshot("life", 0, {}))
        self._step = dict.fromkeys(self._replicas, 0)
        self._running: dict[Job, _Running] = {}
        self._turns: list[Turn] = []

    def run(self) -> FleetRun:
        """From the first request to the end of the last."""
        rng = random.Random(self._fleet.seed)
        offsets: dict[str, float] = {}
        for session in self._trace.sessions:
            offset = 0.0
            if not self._trace.open_loop:
                root = session.parent or session.name
                offset = offsets.setdefault(root, rng.uniform(0, self._fleet.window))
            self._begin(session, offset + session.start / self._fleet.pace)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        busy = sum(replica.busy_seconds for replica in self._replicas.values())
        return FleetRun(self._turns, self._now, busy / (self._now * len(self._replicas)), self._router)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _begin(self, session: BlockSession, start: float) -> None:
        if not self._trace.open_loop:
            self._at(start, partial(self._arrive, session, 0))
            return
        for position, request in enumerate(session.requests):
            start += request.after / self._fleet.pace
            self._at(start, partial(self._arrive, session, position))

    def _arrive(self, session: BlockSession, position: int) -> None:
        request = session.requests[position]
        loads = [
            WorkerLoad(
                name,
                requests=replica.requests,
                max_concurrency=256,
                kv_tokens=self._fleet.blocks * self._trace.block_size,
            )
            for name, replica in self._replicas.items()
        ]
        route = self._router.route(
            digests=request.digests,
            prompt_tokens=request.prompt_tokens,
            block_size=self._trace.block_size,
            session=SessionRef("", session.name, parent=session.parent),
            loads=loads,
        )
        receipt = route.receipt
        turn = Turn(
            self._now,
            receipt.worker,
            receipt.reason,
            request,
            promised_tokens=receipt.matched_tokens,
            estimated=receipt.seconds,
        )
        self._turns.append(turn)
        job = Job(request.digests, request.prompt_tokens, request.output_tokens, self._now)
        self._running[job] = _Running(route, turn, session, position)
        replica = self._replicas[receipt.worker]
        if replica.add(job, self._now) or not replica.busy:
            self._go_on(replica)

    def _go_on(self, replica: SimulatedReplica) -> None:
        """Begins a step unless one is under way, and makes sure that its end is noticed."""
        if not replica.busy and not replica.begin_step(self._now):
            return
        self._step[replica.name] += 1
        self._at(replica.step_ends, partial(self._step_over, replica, self._step[replica.name]))

    def _step_over(self, replica: SimulatedReplica, step: int) -> None:
        if step != self._step[replica.name]:
            return  # It was cut short.
        changes = replica.end_step(self._now)
        self._tell(replica)
        self._account(replica, changes)
        self._go_on(replica)

    def _tell(self, replica: SimulatedReplica) -> None:
        events = tuple(replica.pool.take_events())
        if events:
            self._sequence[replica.name] += 1
            batch = EventBatch("life", self._sequence[replica.name], events)
            self._at(self._now + self._fleet.event_delay, partial(self._apply, replica.name, batch))

    def _apply(self, name: str, batch: EventBatch) -> None:
        self._index.apply(name, batch)

    def _account(self, replica: SimulatedReplica, changes: Changes) -> None:
        for job in changes.started:
            running = self._running[job]
            running.route.started(job.cached_tokens, job.started_at - job.arrived)
            running.turn.cached_tokens = job.cached_tokens
        for job in changes.first_tokens:
            running = self._running[job]
            running.route.computed(job.cached_tokens)
            running.turn.time_to_first_token = self._now - job.arrived
        self._router.generated(replica.name, changes.generated)
        for job in changes.finished:
            running = self._running.pop(job)
            running.route.finished(job.first_token_at - job.started_at, self._now - job.first_token_at)
            follows = running.position + 1
            if not self._trace.open_loop and follows < len(running.session.requests):
                pause = running.session.requests[follows].after / self._fleet.pace
                self._at(self._now + pause, partial(self._arrive, running.session, follows))


@dataclass(frozen=True, slots=True)
class _Running:
    route: Route
    turn: Turn
    session: BlockSession
    position: int
