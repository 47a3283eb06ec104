"""Work that gives way to tokens."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

LESS_URGENT = 5
"""Compiling is for one caller who has just come, tokens are for all who wait already."""


def step_back(niceness: int) -> None:
    """Makes the calling thread, and those that it starts, less urgent than the rest of the process, for good. Where threads
    have no niceness of their own (elsewhere than on Linux), nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


def aside(work: Callable[[], T]) -> T:
    """Does long work that needs no interpreter lock on a thread that has stepped back, since none may step forward again, and
    waits for it. Raises what it raises."""
    future: Future[T] = Future()

    def run() -> None:
        step_back(LESS_URGENT)
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    threading.Thread(target=run, name="grammar-compile", daemon=True).start()
    return future.result()
