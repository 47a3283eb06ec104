"""One worker of a pool: what it is, how it is, what is in flight there. Looks after it in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gateway.router.costs import WorkerLoad
from gateway.workers.base import ChunkStream, Worker, WorkerError, WorkerUnavailableError
from gateway.workers.books import InFlight
from gateway.workers.breaker import Breaker
from gateway.workers.kv_subscriber import KVEventSubscriber
from gateway.workers.protocol import PROTOCOL_VERSION, WorkerInfo, WorkerStats
from gateway.workers.sharing import Sharing
from prefix_cache.index import ResidencyIndex

log = logging.getLogger(__name__)


class State(Enum):
    """How a worker is."""

    STARTING = "starting"
    """Not yet reached, or not yet able to generate."""
    READY = "ready"
    DOWN = "down"
    """Was ready; cannot be reached, or says that it cannot generate."""
    MISMATCHED = "mismatched"
    """Reached, but not of this pool: another model, namespace or block size."""


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """`poll_interval`: seconds between looks at a worker. `unresponsive_after`: seconds of complete silence (no reply, no
    chunk of any stream) after which a worker that can still be connected to counts as down; a busy one is never so silent."""

    poll_interval: float = 1.0
    unresponsive_after: float = 30.0


class Watcher(Protocol):
    """What a member tells its pool."""

    def admits(self, member: Member, info: WorkerInfo) -> str | None:
        """None when a worker like this belongs here, else why not."""

    def changed(self, member: Member) -> None:
        """Its state is another than before, and perhaps what it is."""


class Member:
    """A worker, its state, its load. `start` and `stop` it on the event loop."""

    def __init__(
        self,
        name: str,
        client: Worker,
        index: ResidencyIndex,
        watcher: Watcher,
        config: ProbeConfig,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.client = client
        self.books = InFlight()
        self.sharing = Sharing()
        self.breaker = Breaker()
        self.state = State.STARTING
        self.detail = "not reached yet"
        self.info: WorkerInfo | None = None
        self.stats: WorkerStats | None = None
        self.last_heard = clock()
        self.missed = 0
        self.drained = False
        """An operator has asked that nothing new goes there."""
        self.streams: set[ChunkStream] = set()
        self._index = index
        self._watcher = watcher
        self._config = config
        self._clock = clock
        self._foreign_tokens = 0
        self._foreign_requests = 0
        self._subscriber: KVEventSubscriber | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopped = False

    def start(self) -> None:
        """Begins to look after the worker; once."""
        self._task = asyncio.create_task(self._watch(), name=f"worker-{self.name}")

    def stop(self) -> None:
        """Ends it at once: no state changes, no events any more. `wait_stopped` frees the rest."""
        if self._stopped:
            return
        self._stopped = True
        if self._subscriber is not None:
            self._subscriber.stop()
        self._index.remove_worker(self.name)
        self._drop_streams()
        if self._task is not None:
            self._task.cancel()

    async def wait_stopped(self) -> None:
        """Waits for the background tasks and closes the connections."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._subscriber is not None:
            await self._subscriber.wait_stopped()
        await self.client.aclose()

    @property
    def available(self) -> bool:
        """May be sent a request now."""
        if self.state is not State.READY or self.drained or (self.stats is not None and self.stats.draining):
            return False
        return self.breaker.allows(self._clock())

    @property
    def draining(self) -> bool:
        """Finishes what it has and gets nothing new: an operator said so, or the worker itself, which shuts down."""
        return self.drained or (self.stats is not None and self.stats.draining)

    @property
    def events_lag(self) -> float | None:
        """Seconds since its KV events were last heard of; None while they are not followed."""
        return None if self._subscriber is None else self._subscriber.lag

    @property
    def requests(self) -> int:
        """In flight there, others' among them, as last reported."""
        return self.books.requests + self._foreign_requests

    @property
    def load(self) -> WorkerLoad:
        """Own books, exact, and what others put on it, as last reported."""
        info, books = self.info, self.books
        queued, requests = books.queued_tokens + self._foreign_tokens, books.waiting + books.running + self._foreign_requests
        if info is None:
            return WorkerLoad(self.name, queued, requests)
        kv_tokens = info.num_blocks * info.block_size
        held = 0 if self.stats is None else self.stats.held_prompt_tokens
        return WorkerLoad(self.name, queued, requests, info.max_concurrency, info.instance, kv_tokens, held)

    def heard(self) -> None:
        """A chunk has come: it is alive, whatever its probes do."""
        self.last_heard = self._clock()
        self.missed = 0

    def sent(self) -> None:
        """A request goes out."""
        self.breaker.sent(self._clock())

    def began(self) -> None:
        """It began to answer a request."""
        self.heard()
        self.breaker.began()

    def succeeded(self) -> None:
        """It did what it was asked."""
        self.heard()
        self.breaker.succeeded()

    def failed(self, error: WorkerUnavailableError) -> None:
        """It failed a request. An honest 'busy' is no failure; a refused connection takes it down at once."""
        if self._stopped:
            return
        if not error.reached:
            self._down(str(error))
        elif not error.busy:
            self.breaker.failed(self._clock())
        self._wake.set()

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            try:
                if self.state is State.READY:
                    await self._poll()
                else:
                    await self._join()
            except WorkerUnavailableError as error:
                self._missed(error)
            except WorkerError as error:
                self._down(f"does not speak the worker protocol: {error}")
            except Exception:
                log.exception("worker %s: looking after it failed", self.name)
            try:
                async with asyncio.timeout(self._config.poll_interval):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _join(self) -> None:
        """Reaches the worker and finds out what it is."""
        reason = await self.client.healthy()
        if reason is not None:
            self.heard()
            self._set(State.DOWN if self.state is State.DOWN else State.STARTING, reason)
            return
        info = await self.client.info()
        self.heard()
        if info.protocol_version != PROTOCOL_VERSION:
            reason = f"it speaks version {info.protocol_version} of the worker protocol, this gateway {PROTOCOL_VERSION}"
        else:
            reason = self._watcher.admits(self, info)
        if reason is not None:
            self._set(State.MISMATCHED, reason)
            return
        if self.info is not None and self.info.instance != info.instance:
            self.stats = None
            self.breaker = Breaker()
            await self._end_subscription()
        self.info = info
        if info.capabilities.kv_events and self._subscriber is None:
            self._subscriber = KVEventSubscriber(self.name, self.client, self._index, clock=self._clock)
            self._subscriber.start()
        self._set(State.READY, "")
        await self._poll()

    async def _end_subscription(self) -> None:
        """It is another than it was: what its predecessor held is gone, also where nobody says so."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.stop()
            await subscriber.wait_stopped()
        self._index.remove_worker(self.name)

    async def _poll(self) -> None:
        # What was in flight here at any moment of the exchange is ours: better to overlook a foreigner than to invent one.
        before_tokens, before_requests = self.books.waiting_prompt_tokens, self.books.requests
        opened, set_aside = self.books.opened, self.books.running_blocks
        stats = await self.client.stats()
        self.heard()
        if self.info is None or stats.instance != self.info.instance:
            self._down("it was restarted")
            self._wake.set()
            return
        self.stats = stats
        own_tokens = max(before_tokens, self.books.waiting_prompt_tokens)
        own_requests = before_requests + self.books.opened - opened
        self.sharing.observe(max(set_aside, self.books.running_blocks), stats)
        self._foreign_requests = max(stats.running + stats.waiting - own_requests, 0)
        self._foreign_tokens = max(stats.waiting_prompt_tokens - own_tokens, 0) if self._foreign_requests else 0

    def _missed(self, error: WorkerUnavailableError) -> None:
        self.missed += 1
        # An old report is no report: a worker must not look loaded because it does not answer.
        self._foreign_tokens = self._foreign_requests = 0
        silent = self._clock() - self.last_heard
        if self.state is not State.READY:
            if self.state is State.STARTING and str(error) != self.detail and not self._stopped:
                log.warning("worker %s cannot be used yet: %s", self.name, error)
            self._set(self.state, str(error))
        elif not error.reached:
            self._down(str(error))
        elif silent > self._config.unresponsive_after:
            self._down(f"it has not been heard of for {silent:.0f} s: {error}")
            # A dead process closes its connections; a frozen one would keep its clients waiting for ever.
            self._drop_streams()

    def _down(self, reason: str) -> None:
        self._foreign_tokens = self._foreign_requests = 0
        self._set(State.DOWN if self.state in (State.READY, State.DOWN) else self.state, reason)

    def _drop_streams(self) -> None:
        for stream in tuple(self.streams):
            stream.close()

    def _set(self, state: State, detail: str) -> None:
        changed = state is not self.state
        if self._stopped or (not changed and detail == self.detail):
            return
        self.state, self.detail = state, detail
        if state is State.READY and self.info is not None:
            log.info("worker %s is ready: %s, %d blocks", self.name, self.info.model, self.info.num_blocks)
        elif changed or state is State.MISMATCHED:
            log.warning("worker %s is %s: %s", self.name, state.value, detail)
        if changed:
            self._watcher.changed(self)
