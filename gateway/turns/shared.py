"""One generation and everybody who reads it.

Events are pulled from the worker by a task that belongs to nobody in particular, a few ahead of whoever reads fastest: a reader
that leaves does not disturb the others, and the last one to leave ends the generation. What was pulled is kept as long as
a retry may still want the stream from its beginning, within a bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gateway.choices import ChoiceDelta, TurnEvent
from gateway.histories.keeper import TurnHistory
from gateway.running import RunningTurn
from gateway.turn import TurnError
from gateway.turns.kept_events import EventBudget, KeptEvents
from gateway.turns.reader import Reader
from gateway.watching.watch import WatchedTurn

log = logging.getLogger(__name__)

_AHEAD = 64
"""Events pulled that nobody has read: a slow client slows its worker down instead of filling this process."""


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


class SharedTurn:
    """A generation with at least one reader. Make it with a running event loop; it starts at once."""

    def __init__(self, start: Start, settle: Settle, *, budget: EventBudget, max_bytes: int, keep: bool) -> None:
        """`keep`: retries may attach, so its events are kept from the first one on, up to `max_bytes`."""
        self.events = KeptEvents(budget, max_bytes, whole=keep)
        self.seen_token = False
        """A token has come."""
        self.heard = 0.0
        """When something came last, in monotonic seconds."""
        self._readers: list[Reader] = []
        self._begun: Begun | None = None
        self._started = False
        self._error: TurnError | Exception | None = None
        self._ended = False
        self._settle: Settle | None = settle
        self._settling = False
        self._room: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._closed = False
        self._running = asyncio.get_running_loop().create_task(self._run(start))

    @property
    def whole(self) -> bool:
        """Whether every event since the first is still here, so that a stream can begin at its beginning."""
        return self.events.whole

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def ended(self) -> bool:
        """Nothing follows."""
        return self._ended

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
        return self.events.bytes

    def read(self) -> Reader:
        """A reader of its events from the oldest that is kept: all of them where it is `whole`."""
        reader = Reader(self, self.events.first)
        self._readers.append(reader)
        return reader

    def forget(self) -> None:
        """Keeps no more events than its readers need."""
        self.events.whole = False
        self._trim()

    def slim(self) -> None:
        """After its end, where its answer is kept: its prompt, its conversation and its connections go; once these are closed,
        where the last reader was torn away while they were."""
        if self._closing is not None and not self._closing.done():
            self._closing.add_done_callback(lambda _: self.slim())
            return
        running = self.begun().running
        running.release()
        self._begun = Begun(running)

    @property
    def is_begun(self) -> bool:
        """Its prompts are on their workers, or never will be."""
        return self._begun is not None or self._ended

    @property
    def is_started(self) -> bool:
        """Its prompts have left their queues, or never will."""
        return self._started or self._ended

    def begun(self) -> Begun:
        """The turn, where `is_begun`. Raises what became of it instead."""
        if self._begun is None:
            raise self._error if self._error is not None else RuntimeError("the turn has not begun")
        return self._begun

    def check_started(self) -> None:
        """Where `is_started`: raises what became of it instead."""
        if not self._started and self._error is not None:
            raise self._error

    def has(self, number: int) -> bool:
        """Whether event `number` can be taken, or will never come."""
        return self._ended or number < self.events.next

    async def _run(self, start: Start) -> None:
        """The turn from its beginning to its end, in one task: a turn is short, and tasks are what it costs most in."""
        try:
            begun = self._begun = await start()
            self._hear()
            await begun.running.started()
            self._started = True
            self._hear()
            async with aclosing(begun.running.events()) as events:
                async for event in events:
                    self._add(event)
                    while self._ahead() >= _AHEAD or (self.events.bytes > self.events.max_bytes and self._ahead() > 1):
                        self._room = asyncio.get_running_loop().create_future()
                        await self._room
            await self._settle_once(complete=True)
        except Exception as error:  # noqa: BLE001 - handed to every reader, who raises it
            self._error = error
        except BaseException:
            # Ended from here. Nobody reads any more; whoever should ask all the same hears why nothing follows.
            self._error = TurnError(503, "aborted", "The turn was ended before it was complete. Try again.")
            raise
        finally:
            self._ended = True
            self._tell()
        if self._error is None:
            # Nothing runs any more, so no reader waits for this.
            try:
                await begun.running.aclose()
            except Exception:
                log.exception("what a turn held could not be given back")
            self._closed = True

    def _hear(self) -> None:
        self.heard = time.monotonic()
        self._tell()

    def _tell(self) -> None:
        """Readers that wait look again."""
        for reader in self._readers:
            if not reader.at_end_only or self._ended:
                reader.wake()

    def _add(self, event: TurnEvent) -> None:
        self.events.add(event)
        if not self.seen_token and isinstance(event, ChoiceDelta) and event.token_ids:
            self.seen_token = True
            for reader in self._readers:
                if reader.on_first_token is not None:
                    reader.on_first_token()
        self._trim()
        self._hear()

    def _ahead(self) -> int:
        """Events that no reader has taken."""
        if len(self._readers) == 1:
            return self.events.next - self._readers[0].number
        if not self._readers:
            return self.events.next - self.events.first
        return self.events.next - max([reader.number for reader in self._readers])

    def event(self, number: int) -> TurnEvent | None:
        """Event `number`; None after the last. Raises what ended the turn, or TurnError for an event that is not kept."""
        if number < self.events.first:
            raise TurnError(
                503,
                "fell_behind",
                f"This connection is more than {self.events.max_bytes} bytes behind another that reads the same turn. Send the "
                "request again and read faster.",
                retry_after=0.0,
            )
        if number < self.events.next:
            return self.events[number]
        if self._error is not None:
            raise self._error
        return None

    def _trim(self) -> None:
        """Drops what nobody needs; and what only a reader needs that is too far behind the others."""
        if self.events.whole:
            return
        if len(self._readers) == 1:
            number = self._readers[0].number
            self.events.trim(number, number)
            return
        places = [reader.number for reader in self._readers] or [self.events.next]
        self.events.trim(min(places), max(places))

    def took(self) -> None:
        """A reader has gone on."""
        self._trim()
        if self._room is not None and self._ahead() < _AHEAD // 2:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    async def left(self, reader: Reader) -> None:
        """A reader goes: the last one ends what still runs. Returns when the worker has been told."""
        self._readers.remove(reader)
        self._trim()
        if self._closed or (self._readers and not self._ended):
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        refused = is_refusal(self._error)  # nothing of it was computed, and it is no turn of its session
        if not self._running.done():
            if not self._settling:
                self._running.cancel()
            # A ledger that is being written is written.
            await asyncio.wait({self._running})
        if self._begun is not None and not self._closed:
            await self._begun.running.aclose()
            if not refused:
                await self._settle_once(complete=False)
        self._closed = True

    async def _settle_once(self, *, complete: bool) -> None:
        settle, self._settle = self._settle, None
        if settle is not None:
            self._settling = True
            await settle(self.begun(), complete)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a turn ended because its request was wrong."""
    return isinstance(error, TurnError) and 400 <= error.status < 500
