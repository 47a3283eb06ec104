"""One generation and everybody who reads it.

Events are pulled from the worker by a task that belongs to nobody in particular, a few ahead of whoever reads fastest: a reader
that leaves does not disturb the others, and the last one to leave ends the generation. What was pulled is kept as long as
a retry may still want the stream from its beginning, within a bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gateway.choices import ChoiceDelta, TurnEvent
from gateway.histories.keeper import TurnHistory
from gateway.running import RunningTurn
from gateway.turn import TurnError
from gateway.watching.watch import WatchedTurn
from grammar.deltas import ReasoningDelta, TextDelta, ToolCallArguments

_AHEAD = 64
"""Events pulled that nobody has read: a slow client slows its worker down instead of filling this process."""

_EVENT_BYTES = 200
_DELTA_BYTES = 100
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 160


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn whose prompts are on their workers, and its part in its session where it has one."""

    running: RunningTurn
    history: TurnHistory | None = None
    watched: WatchedTurn | None = None


Start = Callable[[], Coroutine[Any, Any, Begun]]
Settle = Callable[[Begun, bool], Coroutine[Any, Any, None]]
"""Writes a turn into its session, complete or not. Once, and before any reader hears of the end: the next may follow. Not
called for a turn that its worker refused."""


class EventBudget:
    """Bytes of events that all turns together may keep. `free` is what is left of them."""

    def __init__(self, max_bytes: int) -> None:
        self.free = max_bytes


class SharedTurn:
    """A generation with at least one reader. Make it with a running event loop; it starts at once."""

    def __init__(self, start: Start, settle: Settle, *, budget: EventBudget, max_bytes: int, keep: bool) -> None:
        """`keep`: retries may attach, so its events are kept from the first one on, up to `max_bytes`."""
        self._budget = budget
        self._max_bytes = max_bytes
        self._whole = keep
        self._readers: list[Reader] = []
        self._events: deque[tuple[TurnEvent, int]] = deque()
        self._first = 0  # number of the oldest event that is kept
        self._bytes = 0
        self._error: TurnError | Exception | None = None
        self._ended = False
        self._settle: Settle | None = settle
        self._settling = False
        loop = asyncio.get_running_loop()
        self._starting: asyncio.Future[Begun] = loop.create_future()
        self._queued: asyncio.Future[None] = loop.create_future()
        self._room: asyncio.Future[None] | None = None
        self._running = loop.create_task(self._run(start))
        self._waiting: set[asyncio.Future[None]] = set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def whole(self) -> bool:
        """Whether every event since the first is still here, so that a stream can begin at its beginning."""
        return self._whole

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def complete(self) -> bool:
        """It came to its end without an error."""
        return self._ended and self._error is None

    @property
    def failed(self) -> bool:
        """It will not come to a good end; nothing is gained by attaching to it."""
        return self._error is not None or (self._closing is not None and not self._ended)

    @property
    def bytes(self) -> int:
        """Held by its events, estimated."""
        return self._bytes

    def read(self) -> Reader:
        """A reader of its events from the oldest that is kept: all of them where it is `whole`."""
        reader = Reader(self, self._first)
        self._readers.append(reader)
        return reader

    def forget(self) -> None:
        """Keeps no more events than its readers need."""
        self._whole = False
        self._trim()

    def slim(self) -> None:
        """After its end, where its answer is kept: its prompt, its conversation and its connections go; once these are closed,
        where the last reader was torn away while they were."""
        if self._closing is not None and not self._closing.done():
            self._closing.add_done_callback(lambda _: self.slim())
            return
        running = self._starting.result().running
        running.release()
        self._starting = asyncio.get_running_loop().create_future()
        self._starting.set_result(Begun(running))

    async def begun(self) -> Begun:
        """The turn, once its prompts are on their workers. Raises TurnError."""
        return await asyncio.shield(self._starting)

    async def wait_begun(self, timeout: float) -> bool:
        """Whether `begun` would return, or raise, at once within `timeout` seconds."""
        await asyncio.wait({self._starting}, timeout=timeout)
        return self._starting.done()

    async def wait_started(self, timeout: float) -> bool:
        """Whether the prompts have left their queues within `timeout` seconds. Raises TurnError when they never will."""
        await asyncio.wait({self._queued}, timeout=timeout)
        if self._queued.done():
            self._queued.result()
        return self._queued.done()

    def has(self, number: int) -> bool:
        """Whether event `number` can be taken, or will never come."""
        return self._ended or number < self._first + len(self._events)

    async def pull(self, timeout: float | None) -> None:
        """Waits until there is one more event, the end, or `timeout` seconds have passed. Cancelling it disturbs nobody."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.add(waiter)
        alarm = None if timeout is None else loop.call_later(timeout, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            if alarm is not None:
                alarm.cancel()

    async def _run(self, start: Start) -> None:
        """The turn from its beginning to its end, in one task: a turn is short, and tasks are what it costs most in."""
        try:
            begun = await start()
            self._starting.set_result(begun)
            await begun.running.started()
            self._queued.set_result(None)
            async with aclosing(begun.running.events()) as events:
                async for event in events:
                    self._add(event)
                    self._tell()
                    while self._ahead() >= _AHEAD or (self._bytes > self._max_bytes and self._ahead() > 1):
                        self._room = asyncio.get_running_loop().create_future()
                        await self._room
            await self._settle_once(complete=True)
            self._ended = True
        except Exception as error:  # noqa: BLE001 - handed to every reader, who raises it
            self._error = error
            self._ended = True
            for future in (self._starting, self._queued):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # readers may have gone, and nobody ask
        finally:
            self._starting.cancel()
            self._queued.cancel()
            self._tell()

    def _tell(self) -> None:
        """Readers that wait look again."""
        for waiter in self._waiting:
            _wake(waiter)

    def _ahead(self) -> int:
        """Events that no reader has taken."""
        read = max((reader.number for reader in self._readers), default=self._first)
        return self._first + len(self._events) - read

    def event(self, number: int) -> TurnEvent | None:
        """Event `number`; None after the last. Raises what ended the turn, or TurnError for an event that is not kept."""
        if number < self._first:
            raise TurnError(
                503,
                "fell_behind",
                f"This connection is more than {self._max_bytes} bytes behind another that reads the same turn. Send the "
                "request again and read faster.",
                retry_after=0.0,
            )
        position = number - self._first
        if position < len(self._events):
            return self._events[position][0]
        if self._error is not None:
            raise self._error
        return None

    def _add(self, event: TurnEvent) -> None:
        size = _size(event)
        self._events.append((event, size))
        self._bytes += size
        self._budget.free -= size
        if self._whole and (self._bytes > self._max_bytes or self._budget.free < 0):
            self.forget()

    def _trim(self) -> None:
        """Drops what nobody needs; and what only a reader needs that is too far behind the others."""
        if self._whole:
            return
        places = [reader.number for reader in self._readers]
        needed, fastest = (min(places), max(places)) if places else (self._first + len(self._events),) * 2
        while self._events and (self._first < needed or (self._bytes > self._max_bytes and self._first < fastest)):
            size = self._events.popleft()[1]
            self._first += 1
            self._bytes -= size
            self._budget.free += size

    def took(self) -> None:
        """A reader has gone on."""
        self._trim()
        if self._room is not None and self._ahead() < _AHEAD // 2:
            _wake(self._room)
            self._room = None

    async def left(self, reader: Reader) -> None:
        """A reader goes: the last one ends what still runs. Returns when the worker has been told."""
        self._readers.remove(reader)
        self._trim()
        if self._readers and not self._ended:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    @property
    def _refused(self) -> bool:
        """Its worker would not take it: nothing of it was computed, and it is no turn of its session."""
        queued = self._queued.exception() if self._queued.done() and not self._queued.cancelled() else None
        return is_refusal(self._error) or is_refusal(queued)

    async def _close(self) -> None:
        refused = self._refused
        if not self._running.done():
            if not self._settling:
                self._running.cancel()
            # A ledger that is being written is written.
            await asyncio.wait({self._running})
        if not self._starting.cancelled() and self._starting.exception() is None:
            await self._starting.result().running.aclose()
            if not refused:
                await self._settle_once(complete=False)

    async def _settle_once(self, *, complete: bool) -> None:
        settle, self._settle = self._settle, None
        if settle is not None:
            self._settling = True
            await settle(self._starting.result(), complete)


class Reader:
    """One client's place in a turn."""

    def __init__(self, shared: SharedTurn, number: int) -> None:
        self.shared = shared
        self.number = number
        self._left = False

    @property
    def ready(self) -> bool:
        """Whether `take` has something to say now."""
        return self.shared.has(self.number)

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether `take` has something to say within `timeout` seconds."""
        if not self.ready:
            await self.shared.pull(timeout)
        return self.ready

    def take(self) -> TurnEvent | None:
        """The next event; None after the last. Call it after `wait` was true. Raises what ended the turn."""
        event = self.shared.event(self.number)
        if event is not None:
            self.number += 1
            self.shared.took()
        return event

    async def aclose(self) -> None:
        """Leaves; idempotent."""
        if not self._left:
            self._left = True
            await self.shared.left(self)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a turn ended because its request was wrong."""
    return isinstance(error, TurnError) and 400 <= error.status < 500


def _size(event: TurnEvent) -> int:
    if not isinstance(event, ChoiceDelta):
        return _EVENT_BYTES
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for delta in event.deltas:
        size += _DELTA_BYTES
        if isinstance(delta, TextDelta | ReasoningDelta | ToolCallArguments):
            size += len(delta.text)
    for logprob in event.logprobs:
        size += _LOGPROB_BYTES * (1 + len(logprob.top))
    return size
