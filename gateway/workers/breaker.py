"""A circuit breaker: a worker that keeps failing is left alone for a while, then tried with one request.

Only failures of the worker itself count: an answer of 5xx, a stream that broke off, a refused connection. What a client did
wrong, an honest "busy" and a slow answer do not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Opens after `threshold` failures in a row, for `first` seconds, doubling up to `longest` while trials fail.

    Times are on any monotonic clock, given by the caller.
    """

    threshold: int = 3
    first: float = 1.0
    longest: float = 30.0
    failures: int = 0
    _open_until: float | None = None
    _pause: float = 0.0
    _trial_since: float | None = None

    def allows(self, now: float) -> bool:
        """True when a request may be sent. When half-open, only while no trial is under way."""
        if self._open_until is None:
            return True
        if now < self._open_until:
            return False
        # A trial whose end never came must not shut the worker out for ever.
        return self._trial_since is None or now - self._trial_since > self.longest

    def sent(self, now: float) -> None:
        """A request goes out; in the half-open state it is the trial."""
        if self._open_until is not None:
            self._trial_since = now

    def began(self) -> None:
        """The worker began to answer: others may come as well, but what it failed is forgiven only once it has answered. One
        that begins every answer and ends none would never be left alone otherwise."""
        if self._open_until is not None:
            self.failures = min(self.failures, self.threshold - 1)
        self._open_until = None
        self._trial_since = None

    def succeeded(self) -> None:
        """The worker did what it was asked: everything is forgiven."""
        self.failures = 0
        self._open_until = None
        self._pause = 0.0
        self._trial_since = None

    def failed(self, now: float) -> None:
        """The worker failed. What was sent before it was left alone says nothing new: a death with twenty streams is one."""
        if self._open_until is not None and now < self._open_until:
            return
        self.failures += 1
        if self.failures >= self.threshold:
            self._pause = min(max(self._pause * 2, self.first), self.longest)
            self._open_until = now + self._pause
        self._trial_since = None
