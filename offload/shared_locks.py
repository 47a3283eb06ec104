"""Locks between processes that the kernel takes back when their holder dies, at whatever instruction.

They are open file description locks (fcntl(2), F_OFD_SETLK) on single bytes far behind the end of a file, so they need no
memory and nothing is left of them after a kill -9. Unlike a pid kept in shared memory they also work across pid namespaces
and cannot be mistaken for a later process with the same number.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import threading
import time
from collections.abc import Iterator

from offload.errors import TierUnavailable

_BASE = 1 << 40
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


class ByteLocks:
    """Exclusive locks, by number, on the file open as `descriptor`. Whoever closes the descriptor, or dies, lets go of all."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def try_lock(self, number: int) -> bool:
        """Takes lock `number` if nobody else has it; never waits."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, self._request(fcntl.F_WRLCK, number))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, number: int) -> None:
        """Lets go of lock `number`."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, self._request(fcntl.F_UNLCK, number))

    def is_held_elsewhere(self, number: int) -> bool:
        """True when somebody else, alive, holds lock `number`."""
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, self._request(fcntl.F_WRLCK, number))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def is_range_free(self, first: int, count: int) -> bool:
        """True when nobody else holds any of the locks `first` to `first + count - 1`."""
        request = _FLOCK.pack(fcntl.F_WRLCK, 0, _BASE + first, count, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)

    def count_held_elsewhere(self, first: int, count: int) -> int:
        """How many of the locks `first` to `first + count - 1` others hold."""
        held, at, end = 0, _BASE + first, _BASE + first + count
        while at < end:
            request = _FLOCK.pack(fcntl.F_WRLCK, 0, at, end - at, 0)
            kind, _, start, length, _ = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request))
            if kind == fcntl.F_UNLCK:
                break
            # The kernel names the one that it finds first, which need not be the lowest, and joins neighbours of one holder.
            held += sum(self.is_held_elsewhere(number - _BASE) for number in range(at, start))
            held += length
            at = start + length
        return held

    @staticmethod
    def _request(kind: int, number: int) -> bytes:
        return _FLOCK.pack(kind, 0, _BASE + number, 1, 0)


class SharedMutex:
    """One lock over processes and over the threads of this one. Nobody waits longer than `budget` seconds for it: a holder
    that was stopped must not stop its siblings."""

    def __init__(self, locks: ByteLocks, number: int, budget: float = 0.25) -> None:
        self._locks = locks
        self._number = number
        self._budget = budget
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self, budget: float | None = None) -> Iterator[None]:
        """Holds the lock. Raises TierUnavailable when it is not to be had in time."""
        deadline = time.monotonic() + (self._budget if budget is None else budget)
        if not self._threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TierUnavailable("Another thread keeps the lock of the tier's table.")
        try:
            pause = _FIRST_PAUSE
            while not self._locks.try_lock(self._number):
                if time.monotonic() >= deadline:
                    raise TierUnavailable("Another process keeps the lock of the tier's table; is it stopped?")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                yield
            finally:
                self._locks.unlock(self._number)
        finally:
            self._threads.release()
