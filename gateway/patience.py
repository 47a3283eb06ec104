"""How long a request may take in all, and how long nothing may be heard of its worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.turn import TurnError


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

    def heard(self, when: float | None = None) -> None:
        """Something came: now, or then."""
        self._heard = self._clock() if when is None else max(self._heard, when)

    def left(self) -> float | None:
        """Seconds until one of the limits is reached; None: never."""
        now = self._clock()
        left = self._began + self._whole - now if self._whole else None
        if self._stall:
            stalled = self._heard + self._stall - now
            left = stalled if left is None or stalled < left else left
        return left if left is None or left > 0.0 else 0.0

    def whole(self) -> float | None:
        """Seconds until the whole request has taken as long as it may; None: never."""
        return max(self._began + self._whole - self._clock(), 0.0) if self._whole else None

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
        self.check_whole()
        if self._stall and now - self._heard >= self._stall:
            raise TurnError(
                504,
                "generation_stalled",
                f"Nothing was heard of the generation for {self._stall:g} seconds, so it was ended. Send the request again.",
            )

    def check_whole(self) -> None:
        """Raises TurnError 504 where the whole request has taken as long as it may."""
        if self.over:
            raise TurnError(
                504,
                "request_timeout",
                f"The request took longer than {self._whole:g} seconds, which is all it may. Ask for fewer tokens.",
            )
