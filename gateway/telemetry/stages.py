"""Processor time of a turn by stage, counted on the thread that spends it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal

Stage = Literal["parse", "identity", "ledger", "route"]
STAGES: tuple[Stage, ...] = ("parse", "identity", "ledger", "route")


# Asking a thread for its processor time is a system call, and a turn has half a dozen blocks of two calls each. A prime, so
# that the blocks of a stage, which come round in every turn, are all looked at alike.
_LOOKED_AT = 7


class StageTimes:
    """Seconds of processor time since the start, by stage. What a process spends beside them is its proxying: reading and
    writing sockets, decoding what workers send, writing events.

    The first block of a stage is timed, and then one in `_LOOKED_AT`, which counts for those before it.
    """

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self._passed: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self._due: dict[Stage, int] = dict.fromkeys(STAGES, 1)

    def spent(self, stage: Stage) -> AbstractContextManager[None]:
        """Counts what a `with` block spends. It must not wait for anything: others would be counted with it."""
        passed = self._passed[stage] + 1
        if passed < self._due[stage]:
            self._passed[stage] = passed
            return _UNTIMED
        self._passed[stage] = 0
        self._due[stage] = _LOOKED_AT
        return _Spent(self.seconds, stage, passed)


class _Spent:
    """One block, which stands for so many."""

    __slots__ = ("_began", "_blocks", "_seconds", "_stage")

    def __init__(self, seconds: dict[Stage, float], stage: Stage, blocks: int) -> None:
        self._seconds = seconds
        self._stage = stage
        self._blocks = blocks
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._seconds[self._stage] += (time.thread_time() - self._began) * self._blocks


class _Untimed:
    """A block at which nobody looks."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


_UNTIMED = _Untimed()
