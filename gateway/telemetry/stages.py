"""Time of a turn by stage.

The stages do not wait for anything, so that on a processor of their own the time is processor time. It is read from the wall
clock, which costs nothing; asking for a thread's processor time can cost more than a stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["parse", "identity", "ledger", "route"]
STAGES: tuple[Stage, ...] = ("parse", "identity", "ledger", "route")


class StageTimes:
    """Seconds since the start, by stage. What a process computes beside them is its proxying: reading and writing sockets,
    decoding what workers send, writing events."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def spent(self, stage: Stage) -> Iterator[None]:
        """Counts what the block spends. It must not wait for anything: others would be counted with it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began
