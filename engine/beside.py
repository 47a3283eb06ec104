"""A thread that works while its owner is in a call that leaves the interpreter's lock."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")

_Jobs = SimpleQueue[Callable[[], ResultT] | None]
_Outcomes = SimpleQueue[tuple[ResultT | None, BaseException | None]]


class Beside(Generic[ResultT]):
    """One job at a time, for one owner: `begin`, then `take`. Far less than an executor, which costs its owner more than most
    jobs here take. The thread starts with the first job and ends with `close`, or with its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs[ResultT] = SimpleQueue()
        self._outcomes: _Outcomes[ResultT] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], ResultT]) -> None:
        """Has `job` done. `take` must follow."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs, self._outcomes), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def take(self) -> ResultT:
        """What the job returned, once it has; raises what it raised."""
        result, error = self._outcomes.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread when its job is done. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _work(jobs: _Jobs[ResultT], outcomes: _Outcomes[ResultT]) -> None:
    while (job := jobs.get()) is not None:
        try:
            outcomes.put((job(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is taken
            outcomes.put((None, error))
        del job
