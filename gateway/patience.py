"""How long a request may take in all, and how long nothing may be heard of its worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.turn import TurnError

T = TypeVar("T")


class Patience:
    """Of one request, from `began` on (monotonic seconds). 0 for either limit: none."""

    def __init__(
        self, request_timeout: float, stall_timeout: float, began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._whole = request_timeout
        self._stall = stall_timeout
        self._clock = clock
        self._began = began
        self._heard = clock()

    def heard(self) -> None:
        """Something came."""
        self._heard = self._clock()

    def left(self) -> float | None:
        """Seconds until one of the limits is reached; None: never."""
        now = self._clock()
        limits = []
        if self._whole:
            limits.append(self._began + self._whole - now)
        if self._stall:
            limits.append(self._heard + self._stall - now)
        return max(min(limits), 0.0) if limits else None

    def within(self, seconds: float) -> float:
        """So many seconds, or what is left of the whole request where that is less."""
        return min(seconds, max(self._began + self._whole - self._clock(), 0.0)) if self._whole else seconds

    @property
    def over(self) -> bool:
        """Whether the whole request has taken as long as it may."""
        return bool(self._whole) and self._clock() - self._began >= self._whole

    def check(self) -> None:
        """Raises TurnError 504 where a limit is reached."""
        now = self._clock()
        if self._whole and now - self._began >= self._whole:
            raise self._too_long()
        if self._stall and now - self._heard >= self._stall:
            raise TurnError(
                504,
                "generation_stalled",
                f"Nothing was heard of the generation for {self._stall:g} seconds, so it was ended. Send the request again.",
            )

    async def until(self, awaited: Awaitable[T]) -> T:
        """What is awaited, within what the whole request may take. Raises TurnError 504."""
        limit = max(self._began + self._whole - self._clock(), 0.0) if self._whole else None
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await awaited
        except TimeoutError:
            if not timer.expired():
                raise
            raise self._too_long() from None

    def _too_long(self) -> TurnError:
        return TurnError(
            504,
            "request_timeout",
            f"The request took longer than {self._whole:g} seconds, which is all it may. Ask for fewer tokens.",
        )
