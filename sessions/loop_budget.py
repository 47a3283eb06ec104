"""A time limit that does not charge the other side for what one's own event loop is late by."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

_STEPS = 10


class LoopBudget:
    """`async with LoopBudget(seconds)`: like `asyncio.timeout`, raises TimeoutError when the block takes longer; but time for
    which the loop was held up by other work is not counted.

    The budget passes in a few equal steps, each begun when the one before was seen to end: a step that a busy loop sees late
    costs no more than a step, and between any two of them the loop looks for answers that have come. A loop that is never late
    makes this `asyncio.timeout`.
    """

    __slots__ = ("_left", "_step", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._step = seconds / _STEPS
        self._left = _STEPS
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._timeout.__aexit__(kind, error, traceback)

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._step, self._passed)

    def _passed(self) -> None:
        self._left -= 1
        if self._left:
            self._begin()
        else:
            self._timer = None
            self._timeout.reschedule(asyncio.get_running_loop().time())
