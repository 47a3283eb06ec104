"""Follows one worker's KV events and keeps the residency index true to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing

from gateway.workers.base import Worker, WorkerUnavailableError
from prefix_cache.events import Snapshot
from prefix_cache.index import Outcome, ResidencyIndex

log = logging.getLogger(__name__)

_PUT_OFF = 0.1  # of the time of silence


class KVEventSubscriber:
    """One task that subscribes, applies, and subscribes again from where it was when the stream breaks or has a gap.

    `silence`: seconds without any message (workers send heartbeats every few) after which the stream counts as dead, or a tenth
    more.
    Waits between attempts double from `backoff_first` to `backoff_max` seconds, with jitter.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        index: ResidencyIndex,
        *,
        clock: Callable[[], float],
        silence: float = 20.0,
        backoff_first: float = 0.1,
        backoff_max: float = 5.0,
    ) -> None:
        self._name = name
        self._worker = worker
        self._index = index
        self._clock = clock
        self._silence = silence
        self._backoff_first = backoff_first
        self._backoff_max = backoff_max
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._since = clock()
        self._last_message: float | None = None
        self.reconnects = 0
        self.gaps = 0

    def start(self) -> None:
        """Begins in the background; once."""
        if self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._run(), name=f"kv-events-{self._name}")

    @property
    def lag(self) -> float:
        """Seconds since the worker last said anything about its KV (since the start, if it never did)."""
        return self._clock() - (self._since if self._last_message is None else self._last_message)

    @property
    def stale(self) -> bool:
        """True when the index may be behind: nothing heard for longer than heartbeats leave room for."""
        return self.lag > self._silence

    def stop(self) -> None:
        """From now on nothing is applied any more; the task ends soon. See `wait_stopped`."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def wait_stopped(self) -> None:
        """Waits for the task to end after `stop`."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        wait = 0.0
        complained = False
        while not self._stopped:
            if wait:
                await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            heard = self._last_message
            trouble = None
            try:
                if not await self._follow():
                    self.gaps += 1
                    trouble = "a gap in the sequence numbers"
            except WorkerUnavailableError as error:
                trouble = str(error)
            except TimeoutError:
                trouble = f"nothing was heard for {self._silence:g} s"
            if self._last_message != heard:
                wait, complained = 0.0, False
            if not complained and not self._stopped:
                if trouble is None:
                    # It stops, and says so in good order. If it does not come back, whoever looks after it will say that.
                    log.info("worker %s has ended its KV events; subscribing again", self._name)
                else:
                    log.warning("worker %s: KV events interrupted (%s); subscribing again", self._name, trouble)
                complained = True
            self.reconnects += 1
            wait = min(max(wait * 2, self._backoff_first), self._backoff_max)

    async def _follow(self) -> bool:
        """One connection, until it ends (True) or has a gap (False). Raises WorkerUnavailableError, TimeoutError."""
        position = self._index.position(self._name)
        instance, after = (None, 0) if position is None else (position.instance, position.seq)
        loop = asyncio.get_running_loop()
        put_off = 0.0
        async with aclosing(self._worker.kv_events(instance, after)) as messages, asyncio.timeout(self._silence) as deadline:
            async for message in messages:
                self._last_message = self._clock()
                # Every turn has its events, and moving a timer costs as much as reading them.
                if (now := loop.time()) > put_off:
                    put_off = now + _PUT_OFF * self._silence
                    deadline.reschedule(now + (1 + _PUT_OFF) * self._silence)
                if isinstance(message, Snapshot):
                    for _ in self._index.load_snapshot(self._name, message):
                        await asyncio.sleep(0)
                        if self._stopped:
                            return True
                elif self._stopped or self._index.apply(self._name, message) is Outcome.GAP:
                    return self._stopped
        return True
