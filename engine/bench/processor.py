"""Whose the processor was while something was measured."""

from __future__ import annotations

import time

import psutil


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


class OtherProcesses:
    """What other processes take of the processors from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(), time.process_time()

    def share(self) -> float:
        """0 to 1, of all processors, since this was made."""
        seconds = time.monotonic() - self._began
        others = busy_seconds() - self._busy - (time.process_time() - self._own)
        # The machine is counted in ticks, so that little may come out as less than nothing.
        return min(1.0, max(0.0, others / (seconds * (psutil.cpu_count() or 1)))) if seconds > 0 else 0.0
