"""What the router knows of one worker: how fast it is, what stands before a newcomer there, how far its reports are
believed."""

from __future__ import annotations

import math
from typing import Protocol

from gateway.router.costs import WorkerLoad
from gateway.router.deviation import Deviation
from gateway.router.estimator import STEP_TOKENS, Coefficients, Observation, PrefillEstimator
from gateway.router.occupancy import Occupancy
from gateway.router.peers import Peers
from gateway.router.trust import Trust

_MAX_WEIGHT = 50.0
_ERROR_GAIN = 0.05
# Observations after which a worker's own coefficients count half, if they are never wrong.
_SURE_OF_ALL = 50.0
# How many times as wrong as its peers' they may be before they count for nothing.
_WORST_ERROR = 1.5
_FORGET_AFTER = 300.0
# A worker that reports a hundred prompts a second says little new with most of them, and learning costs as much as placing.
_LESSONS_AT_ONCE = 64.0
_LESSONS_A_SECOND = 10.0
_SERVICE_GAIN = 0.05
_SERVICE_PRIOR = 2.0


class Pending(Protocol):
    """A prompt that was sent and is not computed yet. `seconds`, `tokens`: what computing it takes."""

    seconds: float
    tokens: int


class Standing:
    """One worker. Seconds are on the router's clock."""

    __slots__ = (
        "_alike_error",
        "_lessons",
        "_observed_at",
        "_own_error",
        "_recent_at",
        "_recent_seconds",
        "_recent_tokens",
        "_seen_until",
        "_speed",
        "_taught_at",
        "_way",
        "_way_at",
        "_weight",
        "busy_since",
        "estimator",
        "half_life",
        "instance",
        "latency_factor",
        "name",
        "occupancy",
        "own",
        "peers",
        "pending",
        "pending_seconds",
        "pending_tokens",
        "rank",
        "service",
        "trust",
    )

    def __init__(self, name: str, peers: Peers, half_life: float, now: float) -> None:
        self.name = name
        self.estimator = PrefillEstimator()
        self.peers = peers
        self.own: Coefficients | None = None
        """Its coefficients where they surely differ from its peers'."""
        self.half_life = half_life
        self.trust = Trust(name)
        self.occupancy = Occupancy()
        self.pending: dict[Pending, None] = {}
        self.pending_seconds = 0.0
        self.pending_tokens = 0
        self.busy_since = now
        self.rank = 0
        self.instance = ""
        self.service = _SERVICE_PRIOR
        """Seconds that a turn stays there after its first token, in the mean."""
        self.latency_factor = 1.0
        """How many times as far away as its peers."""
        self._way = Deviation(peers.ways)
        self._way_at = now
        self._recent_seconds = self._recent_tokens = 0.0
        self._recent_at = now
        self._weight = 0.0
        self._speed = Deviation(peers.speeds)
        self._own_error = self._alike_error = 0.0
        self._observed_at = now
        self._lessons = _LESSONS_AT_ONCE
        self._taught_at = now
        self._seen_until = -math.inf

    # How fast it is

    @property
    def coefficients(self) -> Coefficients:
        """What it takes to compute a prompt there."""
        return self.own or self.peers.estimator.coefficients

    @property
    def latency(self) -> float:
        """Seconds between here and there: what the first token took beyond what the worker says it did."""
        return self.peers.way.scaled(self.latency_factor)

    def teaches(self, now: float) -> bool:
        """Whether to learn from what it reports now: from all of it but for a worker that goes on at a high rate."""
        lessons = min(self._lessons + max(now - self._taught_at, 0.0) * _LESSONS_A_SECOND, _LESSONS_AT_ONCE)
        self._taught_at = now
        teaches = lessons >= 1.0
        self._lessons = lessons - 1.0 if teaches else lessons
        return teaches

    def observed(self, seen: Observation, now: float, apart: bool) -> None:
        """It has reported how long a prompt took; its peers have heard of it."""
        age = self._age(self._observed_at, now)
        seconds = seen.seconds
        if seconds > 0:
            alike = self.peers.estimator.coefficients.expected(seen)
            error = abs(math.log(seconds / (alike * self._speed.factor(age))))
            own = abs(math.log(seconds / self.estimator.coefficients.expected(seen)))
            gain = max(1.0 / (self._weight + 1.0), _ERROR_GAIN)
            self._alike_error += gain * (error - self._alike_error)
            self._own_error += gain * (own - self._own_error)
            if apart:
                self._speed.add(seconds, alike, age)
        self._weight = min(self._weight * age + 1.0, _MAX_WEIGHT)
        self._observed_at = now
        self.estimator.observe(seen)
        self.refresh(now)

    def apart(self, began: float, ended: float) -> bool:
        """Whether what was seen between these times says anything that was not seen already: fifty requests that wait together
        for a busy machine are one witness of it, not fifty."""
        if began < self._seen_until:
            return False
        self._seen_until = ended
        return True

    def refresh(self, now: float) -> None:
        """Its estimates: those of its peers, for a machine as much slower or faster as it surely is, and its own, the more it
        has said, unless they foretell it worse than its peers'. One factor is known from few requests; seven coefficients are
        not, and differences that are none would send sessions to and fro. A worker that has said nothing for long counts as
        its peers do: one that was slow while it warmed up would get nothing to do any more, and could not show that it is
        not."""
        age = self._age(self._observed_at, now)
        weight = self._weight * age
        right = _WORST_ERROR - self._own_error / self._alike_error if self._alike_error > 0 else 0.0
        share = max(0.0, min(right, 1.0)) * weight / (weight + _SURE_OF_ALL)
        factor = self._speed.factor(age)
        alike = self.peers.estimator.coefficients
        self.own = None
        if share > 0.0 or factor != 1.0:
            self.own = self.estimator.coefficients.mixed(alike, factor, share)
        self.latency_factor = self._way.factor(self._age(self._way_at, now))

    def delayed(self, seconds: float, now: float) -> None:
        """A first token came so much later than by the worker's own account; its peers have heard of it."""
        if math.isfinite(seconds):
            self._way.add(*self.peers.way.compared(seconds), self._age(self._way_at, now))
            self._way_at = now

    def _age(self, then: float, now: float) -> float:
        return math.exp2(-max(now - then, 0.0) / _FORGET_AFTER)

    def left(self) -> None:
        """It is gone."""
        self._speed.forget()
        self._way.forget()

    def lives(self, instance: str) -> None:
        """It is used in this life of it; what another one said of its cache says nothing of this one's."""
        if instance != self.instance:
            if self.instance:
                self.trust.forget()
            self.instance = instance

    # What stands before a newcomer

    def enqueue(self, prompt: Pending, now: float) -> None:
        if not self.pending:
            self.busy_since = now
        self.pending[prompt] = None
        self.pending_seconds += prompt.seconds
        self.pending_tokens += prompt.tokens

    def beside(self, prompt: Pending) -> int:
        """Tokens of other prompts that are computed before its first token: those in front of it, and of those behind it what
        fits into a step with it."""
        front = 0
        for other in self.pending:
            if other is prompt:
                break
            front += other.tokens
        behind = self.pending_tokens - front - prompt.tokens
        return front + max(0, min(behind, STEP_TOKENS - front - prompt.tokens))

    def correct(self, prompt: Pending, seconds: float, tokens: int) -> None:
        """The worker has said how much of it there is to compute."""
        if prompt in self.pending:
            self.pending_seconds += seconds - prompt.seconds
            self.pending_tokens += tokens - prompt.tokens
            prompt.seconds, prompt.tokens = seconds, tokens

    def dequeue(self, prompt: Pending, now: float) -> None:
        """Computed or given up; idempotent."""
        if prompt not in self.pending:
            return
        first = next(iter(self.pending)) is prompt
        del self.pending[prompt]
        self.pending_seconds -= prompt.seconds
        self.pending_tokens -= prompt.tokens
        if first:
            self.busy_since = now
        if not self.pending:
            self.pending_seconds, self.pending_tokens = 0.0, 0

    def queue(self, load: WorkerLoad, prompt_tokens: int, now: float, token: float | None = None) -> float:
        """Seconds until a prompt that comes now is begun. `token`: its coefficient, where the caller has it at hand."""
        seconds = self.pending_seconds
        if self.pending and now > self.busy_since:
            seconds -= min(now - self.busy_since, next(iter(self.pending)).seconds)
        foreign = load.queued_tokens - self.pending_tokens
        if foreign > 0:
            seconds += foreign * (self.coefficients.token if token is None else token)
        beyond = load.requests + 1 - load.max_concurrency
        if beyond > 0:
            seconds += beyond * self.service / load.max_concurrency
        if load.kv_tokens:
            held = self.occupancy.tokens
            missing = held + prompt_tokens - load.kv_tokens
            if missing > 0 and held > 0:
                seconds += min(missing / held, 1.0) * self.service
        return seconds

    # What it did lately

    def worked(self, seconds: float, tokens: float, now: float) -> None:
        """It computed this much."""
        passed = now - self._recent_at
        if passed > 0.0:
            decay = math.exp2(-passed / self.half_life)
            self._recent_seconds *= decay
            self._recent_tokens *= decay
            self._recent_at = now
        self._recent_seconds += seconds
        self._recent_tokens += tokens

    def recent_work(self, now: float) -> float:
        """Seconds of it, each counting half after the half-life."""
        return self._recent_seconds * self._decay(now) if self._recent_seconds else 0.0

    def turnover(self, kv_tokens: int, now: float) -> float:
        """Seconds after which what is stored there now will be the next to go: its capacity over what it computes a second."""
        rate = self._recent_tokens * self._decay(now) * math.log(2) / self.half_life
        return kv_tokens / rate if rate > 0 else math.inf

    def served(self, seconds: float) -> None:
        """A turn has ended, so long after its first token."""
        if 0 <= seconds < math.inf:
            self.service += _SERVICE_GAIN * (seconds - self.service)

    def _decay(self, now: float) -> float:
        return math.exp2(-max(now - self._recent_at, 0.0) / self.half_life)
