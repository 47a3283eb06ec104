"""Ending a forward pass that nobody waits for any more.

A long prompt's step may take seconds, and a client may leave in it. A pass looks at a flag between its layers and ends when it
is set; its tokens count as not computed, so nothing of it is seen by anybody. It is only set while every request of the step
is about to be dropped: what others wait for is never thrown away.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable


class ForwardCancelledError(Exception):
    """The pass has ended early. What it wrote to KV memory belongs to nobody."""


class Cancellation:
    """The flag. Set from any thread; native code reads the int32 at `address`."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._value)

    @property
    def is_set(self) -> bool:
        return self._value.value != 0

    def set(self, value: bool) -> None:
        self._value.value = int(value)

    def check(self) -> None:
        """Raises ForwardCancelledError when it is set."""
        if self.is_set:
            raise ForwardCancelledError


@runtime_checkable
class CancellableForward(Protocol):
    """A forward pass that can end early; `run` raises ForwardCancelledError then."""

    def cancel_by(self, flag: Cancellation) -> None:
        """Looks at this flag from now on."""


@runtime_checkable
class CancellableCore(Protocol):
    """An EngineCore whose step can end early."""

    def cancel(self, request_id: str) -> None:
        """From any thread: the request is about to be aborted, nobody needs what is computed for it."""


class StepCancelling:
    """Which requests are about to be dropped, and which the step that runs is for."""

    def __init__(self) -> None:
        self.flag = Cancellation()
        self._lock = threading.Lock()
        self._leaving: set[str] = set()  # until the engine thread has dropped them, which is posted with each
        self._computing: frozenset[str] = frozenset()

    def leaving(self, request_id: str) -> None:
        """From any thread. `dropped` must follow."""
        with self._lock:
            self._leaving.add(request_id)
            self._decide()

    def dropped(self, request_id: str) -> None:
        """The engine thread has dropped it, or does not know it."""
        with self._lock:
            self._leaving.discard(request_id)

    def begin(self, request_ids: Iterable[str]) -> None:
        """A pass begins that computes these."""
        with self._lock:
            self._computing = frozenset(request_ids)
            self._decide()

    def end(self) -> None:
        """It has ended."""
        with self._lock:
            self._computing = frozenset()
            self._decide()

    def _decide(self) -> None:
        self.flag.set(bool(self._computing) and self._computing <= self._leaving)
