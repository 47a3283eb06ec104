"""One client's place in a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.choices import TurnEvent

if TYPE_CHECKING:
    from gateway.turns.shared import Begun, SharedTurn


class Reader:
    """Reads a turn event by event, or waits for its end. One task at a time may wait."""

    __slots__ = ("_alarm", "_deadline", "_left", "_loop", "_number", "_waiter", "at_end_only", "on_first_token", "shared")

    def __init__(self, shared: SharedTurn, number: int) -> None:
        self.shared = shared
        self.at_end_only = False
        """It takes no events and only wants to know when the turn has ended."""
        self.on_first_token: Callable[[], None] | None = None
        self._number = number
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._deadline: float | None = None

    @property
    def number(self) -> int:
        """Of the next event that it takes."""
        return self.shared.events.next if self.at_end_only else self._number

    @property
    def ready(self) -> bool:
        """Whether `take` has something to say now."""
        return self.shared.has(self._number)

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether `take` has something to say within `timeout` seconds."""
        return await self._until(self._is_ready, timeout)

    async def begun(self, timeout: float | None = None) -> Begun | None:
        """The turn, once its prompts are on their workers; None when they are not within `timeout` seconds. Raises what became
        of it instead."""
        return self.shared.begun() if await self.wait_begun(timeout) else None

    async def wait_begun(self, timeout: float | None = None) -> bool:
        """Whether `begun` returns, or raises, at once within `timeout` seconds."""
        return await self._until(lambda: self.shared.is_begun, timeout)

    async def wait_started(self, timeout: float) -> bool:
        """Whether the prompts have left their queues within `timeout` seconds. Raises TurnError when they never will."""
        if not await self._until(lambda: self.shared.is_started, timeout):
            return False
        self.shared.check_started()
        return True

    def follow(self, first_token: Callable[[], None]) -> None:
        """From now on it takes no events; `first_token` is called at the first that has tokens, at once if that was before.
        For who wants the answer as a whole, which is in the RunningTurn."""
        self.at_end_only = True
        self.shared.took()
        if self.shared.seen_token:
            first_token()
        else:
            self.on_first_token = first_token

    async def wait_end(self, timeout: float | None) -> bool:
        """Whether the turn has ended within `timeout` seconds; `take` then raises what it ended with, or returns None."""
        return await self._until(lambda: self.shared.ended, timeout)

    def take(self) -> TurnEvent | None:
        """The next event; None after the last. Call it after `wait` was true. Raises what ended the turn."""
        event = self.shared.event(self.number)
        if event is not None:
            self._number += 1
            self.shared.took()
        return event

    def wake(self) -> None:
        """There is something new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def aclose(self) -> None:
        """Leaves; idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self._left:
            self._left = True
            await self.shared.left(self)

    def _is_ready(self) -> bool:
        return self.shared.has(self._number)

    async def _until(self, there: Callable[[], bool], timeout: float | None) -> bool:
        """Whether it is there within `timeout` seconds. Cancelling it disturbs nobody."""
        if there():
            return True
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._arm()
        while True:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if there():
                return True
            if self._deadline is not None and self._loop.time() >= self._deadline:
                return False

    def _arm(self) -> None:
        """Sees to it that it is woken at the deadline. An alarm that is set for an earlier time sets itself again: a reader
        waits for each of a thousand events, and hardly ever in vain."""
        if self._deadline is None:
            return
        if self._alarm is not None:
            if self._alarm.when() <= self._deadline:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._waiter is None or self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._arm()
        else:
            self.wake()
