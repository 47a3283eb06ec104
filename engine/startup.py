"""Where the time of a start goes: three parts that add up to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from gateway.workers.protocol import StartupSeconds

Part = Literal["load", "compile", "warm_up"]

PROC_SELF = Path("/proc/self")


class StartupClock:
    """Every moment counts for the part that was entered last; the first is `load`.

    load: interpreter, imports, weights, tokenizer, grammar compiler. compile: kernels, built or found built, and what is laid
    out anew for them. warm_up: the largest step's memory, measured or remembered, a first pass, and on a GPU the decode graphs.
    """

    def __init__(self, already: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`already`: seconds that count for `load` before this clock was made."""
        self._clock = clock
        self._part: Part = "load"
        self._since = clock()
        self._seconds: dict[Part, float] = {"load": already, "compile": 0.0, "warm_up": 0.0}

    def enter(self, part: Part) -> None:
        """From now on time counts for `part`, which may have been entered before."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def seconds(self) -> StartupSeconds:
        """The parts up to now."""
        self.enter(self._part)
        return StartupSeconds(**self._seconds)


def describe(seconds: StartupSeconds) -> str:
    """The log line."""
    total = seconds.load + seconds.compile + seconds.warm_up
    parts = f"load {seconds.load:.2f} s, compile {seconds.compile:.2f} s, warm-up {seconds.warm_up:.2f} s"
    return f"started in {total:.2f} s: {parts}"


def seconds_since_launch(proc_self: Path = PROC_SELF) -> float:
    """How old this process is, to a hundredth of a second; 0 where the system does not say (only Linux does)."""
    try:
        text = (proc_self / "stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])  # starttime, field 22 of proc(5), after a name that may hold spaces
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
