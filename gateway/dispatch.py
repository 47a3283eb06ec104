"""The dispatcher: a turn's prompt goes to the worker the router chooses, and elsewhere when that one fails at once.

Implements `gateway.turn.Dispatcher`. Workers are added and removed while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.admission.config import AdmissionConfig
from gateway.admission.rooms import WorkerRoom, needed_blocks, reserved_output, room_of
from gateway.router.config import RouterConfig
from gateway.router.router import Router
from gateway.telemetry.stages import StageTimes
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Migration, Prompt, SessionRef, TurnError
from gateway.workers.attempt import Placement
from gateway.workers.base import Worker, WorkerError
from gateway.workers.clients import open_client
from gateway.workers.generation import Hooks, Limits, PooledGeneration
from gateway.workers.member import Member, ProbeConfig
from gateway.workers.pool import MakeClient, WorkerPool
from gateway.workers.prompt_request import PromptRequest
from gateway.workers.protocol import MAX_GATHER_SECONDS, RetentionHint, SamplingParams, WorkerInfo
from gateway.workers.retention import RetentionHints
from gateway.workers.spec import WorkerSpec
from gateway.workers.tls import worker_tls
from gateway.workers.transport import Patience
from gateway.workers.views import WorkerView
from prefix_cache.hashing import BlockHash, JoinedDigests
from prefix_cache.index import ResidencyIndex

log = logging.getLogger(__name__)

_MAX_BACKGROUND = 1000
_MAX_MODELS = 1024
_TOLD_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of the worker pool; times are seconds.

    `models`: what the pool may serve, the default first; a worker with another model is kept apart. Empty: the model of
    the first worker. `aliases`: further name -> model. `max_attempts`: workers tried for one turn. `max_migrations`: how often
    a generation that has begun may lose its worker and go on with another; `resume_wait`: how long it waits for one to be
    there. `accept_timeout`: for a worker to accept a request, which may include compiling a grammar. `probe_timeout`: for every
    other answer of a worker. `gather`: for which a worker may keep back tokens of an answer that is delivered whole, so that
    they come together (0: none). `ca_file`: PEM, authorities that are trusted for https workers beside the system's.
    """

    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_attempts: int = 3
    max_migrations: int = 5
    resume_wait: float = 30.0
    retry_after: float = 2.0
    connect_timeout: float = 3.0
    accept_timeout: float = 120.0
    gather: float = 0.2
    poll_interval: float = 1.0
    probe_timeout: float = 5.0
    unresponsive_after: float = 30.0
    ca_file: str | None = None
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"pool.max_attempts must be at least 1, not {self.max_attempts}")
        if self.max_migrations < 0:
            raise ValueError(f"pool.max_migrations must be 0 or more, not {self.max_migrations}")
        if self.resume_wait < 0:
            raise ValueError(f"pool.resume_wait must be 0 or more, not {self.resume_wait}")
        if not 0 <= self.gather <= MAX_GATHER_SECONDS:
            raise ValueError(f"pool.gather must be from 0 to {MAX_GATHER_SECONDS:g}, not {self.gather}")
        for name in ("connect_timeout", "accept_timeout", "poll_interval", "probe_timeout", "unresponsive_after"):
            if not getattr(self, name) > 0:
                raise ValueError(f"pool.{name} must be positive, not {getattr(self, name)}")


class PoolDispatcher:
    """A `gateway.turn.Dispatcher` over a changing set of workers. Use on one event loop; `async with` ends it properly."""

    def __init__(
        self,
        config: PoolConfig,
        telemetry: Telemetry | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_client: MakeClient | None = None,
        admission: AdmissionConfig | None = None,
    ) -> None:
        """Raises ValueError for a ca_file that cannot be used."""
        self._config = config
        self._tls = None if config.ca_file is None else worker_tls(config.ca_file)
        self._admission = admission if admission is not None else AdmissionConfig()
        self._limits = Limits(config.max_attempts, config.max_migrations, config.resume_wait)
        self._freed: Callable[[], None] = lambda: None
        self._roomy: dict[str, Member] = {}
        self._fresh: dict[str, int] = {}  # worker -> tokens that the router has not been told of
        self._telemetry = telemetry
        self._stages = telemetry.stages if telemetry is not None else StageTimes()
        self.index = ResidencyIndex(config.router.max_indexed_blocks, config.router.max_predicted_blocks)
        self.router = Router(
            config.router, self.index, clock, observer=telemetry.metrics.routing if telemetry is not None else None
        )
        self.pool = WorkerPool(
            make_client if make_client is not None else self._client,
            self.index,
            ProbeConfig(config.poll_interval, config.unresponsive_after),
            clock,
            models=config.models,
            aliases=config.aliases,
            retry_after=config.retry_after,
        )
        self._background: set[asyncio.Task[None]] = set()
        self._hints = RetentionHints(self._taker_of_hints)
        if telemetry is not None:
            telemetry.watch_pool(self.workers)
            telemetry.watch_router(self.router.standings, self.index)

    async def __aenter__(self) -> PoolDispatcher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves all workers, with what runs there; idempotent."""
        await self._hints.aclose()
        await self.pool.close()
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def add_worker(self, name: str, worker: str | WorkerSpec) -> None:
        """Starts looking after a worker; a bare address (`http://host:port` or `unix:PATH`) is that of a replica of ours. An
        earlier one of that name is replaced."""
        self.pool.add(name, worker)

    def remove_worker(self, name: str) -> None:
        """Forgets a worker; its turns in flight go elsewhere or end with an error. Unknown names are ignored."""
        if self.pool.remove(name):
            self._fresh.pop(name, None)
            self.router.forget(name)

    def drain(self, name: str, draining: bool) -> bool:
        """Nothing new goes to a worker; what runs there is finished; `draining` False takes it back. Whether there is one."""
        return self.pool.drain(name, draining)

    def workers(self) -> Sequence[WorkerView]:
        """Every worker, with its state and load."""
        return self.pool.views()

    def when_freed(self, callback: Callable[[], None]) -> None:
        """`callback` is called whenever a request has ended on a worker. Call once."""
        self._freed = callback

    def rooms(self, model: str) -> Sequence[WorkerRoom]:
        """What is left of the workers that may take a turn of a model now (gateway.admission.rooms.Rooms)."""
        try:
            members = self.pool.candidates(model, frozenset(), opaque=self.pool.is_opaque(model))
        except TurnError:
            return ()
        for member in members:
            member.books.freed = self._freed
        rooms = [room for room in map(self._room, members) if room is not None]
        if rooms and len(self._roomy) < _MAX_MODELS:
            best = max(rooms, key=lambda room: room.blocks)
            self._roomy[model] = members[rooms.index(best)] if len(rooms) == len(members) else members[0]
        return rooms

    def some_room(self, model: str) -> WorkerRoom | None:
        """What is left of the worker that had most when all were looked at last (gateway.admission.rooms.SomeRoom): with many
        workers, looking at all of them for every turn costs more than routing it."""
        member = self._roomy.get(model)
        if member is None or not member.available or member.missed or self.pool.member(member.name) is not member:
            return None
        return self._room(member)

    def _room(self, member: Member) -> WorkerRoom | None:
        if member.info is None:
            return None
        ahead, blocks = self._admission.ahead, int(member.books.blocks * member.sharing.factor)
        return room_of(member.name, member.info, member.stats, blocks, member.requests, ahead=ahead)

    def _has_room(self, member: Member, blocks: int) -> bool:
        """As `_room(member).takes(blocks)`: this is asked of every worker for every turn."""
        info, requests, share = member.info, member.requests, 1 + self._admission.ahead
        if info is None or not requests:
            return True
        used, stats = int(member.books.blocks * member.sharing.factor), member.stats
        if stats is not None:
            # Turns of sessions in progress pass those that are held there; who may not was held back by admission.
            requests -= min(stats.held, requests)
            used -= min(stats.held_blocks, used)
            used = max(used, stats.num_blocks - stats.free_blocks - stats.cached_blocks)
        if 0 < info.max_concurrency * share < requests + 1:
            return False
        return info.num_blocks <= 0 or used + blocks <= info.num_blocks * share

    async def wait_ready(self, count: int, timeout: float | None = None) -> None:
        """Waits until `count` workers are ready. Raises TimeoutError."""
        await self.pool.wait_ready(count, timeout)

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
        known_as: str | None = None,
        whole: bool = False,
    ) -> PooledGeneration:
        def place(excluded: set[str], generated: int, namespace: str | None) -> Placement:
            tokens = prompt.num_tokens + generated
            return self._place(
                model,
                session,
                prompt.digests,
                tokens,
                excluded,
                resumed_from=namespace,
                request_id=request_id,
                output=reserved_output(sampling, self._admission.output_reserve),
                last_instance=prompt.last_instance,
            )

        generation = PooledGeneration(
            PromptRequest(
                request_id=request_id,
                tokens=prompt.tokens,
                sampling=sampling,
                grammar=prompt.grammar,
                priority=priority,
                session=session.key if session.key is not None else known_as,
                tenant=session.tenant,
                cache_salt=prompt.cache_salt,
                model=self.pool.adapter(model),
                gather=self._config.gather if whole else 0.0,
            ),
            prompt.num_tokens,
            trace_headers,
            self._limits,
            Hooks(
                place=place,
                retried=self._retried,
                abort_later=self._abort_later,
                generated=self._generated,
                changed=self.pool.wait_changed,
                migrated=self._migrated,
                lost=self._lost,
            ),
        )
        await generation.begin()
        return generation

    def pool_info(self, model: str) -> WorkerInfo:
        return self.pool.info(model)

    def models(self) -> tuple[str, ...]:
        return self.pool.models()

    def residency(self, digests: Sequence[BlockHash]) -> Mapping[str, int]:
        return self.index.lookup(digests)

    def supersede(self, model: str, digests: bytes) -> None:
        for member in self.pool.candidates(model, frozenset()):
            info = member.info
            if info is None or not info.capabilities.supersede:
                continue
            held = b"".join(digest for digest in JoinedDigests(digests) if self.index.tiers(member.name, digest))
            if held and len(self._background) < _MAX_BACKGROUND:
                self._in_background(_supersede(member, held))

    def retain(self, worker: str, hint: RetentionHint) -> None:
        self._hints.add(worker, hint)

    def _taker_of_hints(self, name: str) -> Worker | None:
        member = self.pool.member(name)
        info = member.info if member is not None else None
        return member.client if member is not None and info is not None and info.capabilities.retention_hints else None

    def place_text(
        self, model: str, session: SessionRef, digests: Sequence[BlockHash], tokens: int, excluded: set[str]
    ) -> Placement:
        """Where a body for an opaque worker goes: by the digests of its chunks and a guess at its tokens. Raises TurnError."""
        return self._place(model, session, digests, tokens, excluded, opaque=True)

    def _place(
        self,
        model: str,
        session: SessionRef,
        digests: Sequence[BlockHash],
        tokens: int,
        excluded: set[str],
        *,
        resumed_from: str | None = None,
        opaque: bool = False,
        request_id: str = "",
        output: int = 0,
        last_instance: str = "",
    ) -> Placement:
        """`resumed_from`: the namespace of the lost worker that began it, so only one that can go on, with the same weights,
        will do. `output`: tokens for which KV is set aside."""
        members = self.pool.candidates(model, excluded, opaque=opaque)
        if resumed_from is not None:
            members = [member for member in members if _goes_on(member, resumed_from)]
        if not members:
            raise self.pool.none_up(model)
        if self._fresh:
            self._tell_generated()
        info = members[0].info
        blocks = needed_blocks(tokens, output, info)
        # A worker that has no room left is none to choose, unless none has.
        members = [member for member in members if self._has_room(member, blocks)] or members
        with self._stages.spent("route"):
            route = self.router.route(
                digests=digests,
                prompt_tokens=tokens,
                block_size=info.block_size if info is not None else 1,
                session=session,
                loads=[member.load for member in members],
                request_id=request_id,
                last_instance=last_instance,
            )
        chosen = route.receipt.worker
        member = next(member for member in members if member.name == chosen)
        return Placement(member, route, member.books.open(tokens, route.receipt.matched_tokens, blocks))

    def _generated(self, worker: str, tokens: int) -> None:
        """Tokens come by ones and twos, and the router needs to know of them when it places the next turn."""
        fresh = self._fresh[worker] = self._fresh.get(worker, 0) + tokens
        if fresh >= _TOLD_AT_ONCE:
            self._tell_generated()

    def _tell_generated(self) -> None:
        fresh, self._fresh = self._fresh, {}
        for worker, tokens in fresh.items():
            self.router.generated(worker, tokens)

    def _retried(self, worker: str) -> None:
        if self._telemetry is not None:
            self._telemetry.worker_failed(worker)

    def _migrated(self, migration: Migration) -> None:
        if self._telemetry is not None:
            self._telemetry.stream_resumed(migration)

    def _lost(self, worker: str) -> None:
        if self._telemetry is not None:
            self._telemetry.stream_lost(worker)

    def _abort_later(self, member: Member, request_id: str) -> None:
        if len(self._background) < _MAX_BACKGROUND:
            self._in_background(_abort(member, request_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _client(self, spec: WorkerSpec) -> Worker:
        config = self._config
        if self._tls is None and spec.url.startswith("https:"):
            self._tls = worker_tls(None)  # one for all: what the system trusts is much to read
        return open_client(spec, Patience(config.connect_timeout, config.probe_timeout, config.accept_timeout), self._tls)


def _goes_on(member: Member, namespace: str) -> bool:
    """Whether a worker can go on with what one of this namespace began: with other weights it would be another text."""
    info = member.info
    return info is not None and info.capabilities.resume and info.namespace == namespace


async def _supersede(member: Member, digests: bytes) -> None:
    try:
        await member.client.supersede(digests)
    except WorkerError as error:
        log.debug("telling %s of superseded blocks: %s", member.name, error)


async def _abort(member: Member, request_id: str) -> None:
    try:
        await member.client.abort(request_id)
    except WorkerError as error:
        log.debug("aborting %s on %s: %s", request_id, member.name, error)
