"""Time for a simulated engine: the machine's, or one that jumps."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock one can wait on."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait_until(self, deadline: float) -> bool:
        """Waits. False when `interrupt` came first."""

    def interrupt(self) -> None:
        """From any thread: ends the wait that is under way, or else the next one."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, deadline: float) -> bool:
        while (left := deadline - time.monotonic()) > 0:
            if self._interrupted.wait(left):
                self._interrupted.clear()
                return False
        return True

    def interrupt(self) -> None:
        self._interrupted.set()


class VirtualClock:
    """Jumps to whatever is waited for: a simulation takes no longer than its computing."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, deadline: float) -> bool:
        self._now = max(self._now, deadline)
        return True

    def interrupt(self) -> None:
        pass
