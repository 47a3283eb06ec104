"""Processor time of a turn by stage, counted on the thread that spends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["parse", "identity", "ledger", "route"]
STAGES: tuple[Stage, ...] = ("parse", "identity", "ledger", "route")


class StageTimes:
    """Seconds of processor time since the start, by stage. What a process spends beside them is its proxying: reading and
    writing sockets, decoding what workers send, writing events."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def spent(self, stage: Stage) -> Iterator[None]:
        """Counts what the block spends. It must not wait for anything: others would be counted with it."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds[stage] += time.thread_time() - began
