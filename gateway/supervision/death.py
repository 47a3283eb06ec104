"""Why a process ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

_HINTS = {
    signal.SIGKILL: "somebody killed it, or the kernel did because memory ran out (look for 'Out of memory' in dmesg)",
    signal.SIGILL: "this processor lacks an instruction that its code uses",
    signal.SIGBUS: "a mapped file was truncated or its disk failed",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGABRT: "native code gave up",
}


@dataclass(frozen=True, slots=True)
class Death:
    """How a replica ended. `returncode` is negative for a signal; `reason` stands in when we ended it ourselves."""

    returncode: int | None
    uptime: float
    last_lines: Sequence[str] = ()
    reason: str | None = None

    @property
    def cause(self) -> str:
        """The end in a few words, without what it printed."""
        if self.reason is not None:
            return self.reason
        if self.returncode is None:
            return "it could not be started"
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        try:
            number = signal.Signals(-self.returncode)
        except ValueError:
            return f"signal {-self.returncode}"
        hint = _HINTS.get(number)
        return f"killed by {number.name}" + (f": {hint}" if hint else "")

    @property
    def printed(self) -> str:
        """Its last lines on standard error, or nothing."""
        return "".join(f"\n    {line}" for line in self.last_lines)
