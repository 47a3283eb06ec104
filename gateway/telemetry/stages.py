"""Processor time of a turn by stage, counted on the thread that spends it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Literal

Stage = Literal["parse", "identity", "ledger", "route"]
STAGES: tuple[Stage, ...] = ("parse", "identity", "ledger", "route")


class StageTimes:
    """Seconds of processor time since the start, by stage. What a process spends beside them is its proxying: reading and
    writing sockets, decoding what workers send, writing events."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    def spent(self, stage: Stage) -> _Spent:
        """Counts what a `with` block spends. It must not wait for anything: others would be counted with it."""
        return _Spent(self.seconds, stage)


class _Spent:
    """One block."""

    __slots__ = ("_began", "_seconds", "_stage")

    def __init__(self, seconds: dict[Stage, float], stage: Stage) -> None:
        self._seconds = seconds
        self._stage = stage
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._seconds[self._stage] += time.thread_time() - self._began
