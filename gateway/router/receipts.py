"""Every decision with what was known when it was made and what came of it: a bounded ring of them."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.router.costs import Candidate

Result = Literal["open", "running", "finished", "abandoned", "failed"]

TERMS = ("queue", "transfer", "prefill", "interference", "others", "eviction", "recent_work", "stay")
"""The estimates of a candidate that a receipt keeps, in seconds."""

_WIDTH = 1 + len(TERMS)
_FEW = 8  # candidates: as many in every decision take three megabytes in all


@dataclass(slots=True)
class Outcome:
    """What the worker did. None: not known (yet). `regret`: seconds until the first token beyond the best estimate of another
    candidate, 0 where none would have been sooner."""

    result: Result = "open"
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    time_to_first_token: float | None = None
    regret: float | None = None


@dataclass(frozen=True, slots=True)
class Shadow:
    """What another policy would have done: `seconds`, its estimate of the time to the first token there."""

    policy: str
    worker: str
    reason: str
    seconds: float


class Decision:
    """One choice among candidates. The estimates of more than a few are packed once the outcome is known: a ring of decisions
    must stay small."""

    __slots__ = (
        "_candidates",
        "_names",
        "_packed",
        "at",
        "home",
        "outcome",
        "policy",
        "prompt_tokens",
        "reason",
        "request_id",
        "seconds",
        "session",
        "shadow",
        "tenant",
        "worker",
    )

    def __init__(
        self,
        *,
        request_id: str,
        tenant: str,
        session: str | None,
        prompt_tokens: int,
        policy: str,
        chosen: Candidate,
        reason: str,
        home: str | None,
        candidates: Sequence[Candidate],
        shadow: Shadow | None,
    ) -> None:
        self.at = time.time()
        self.request_id = request_id
        self.tenant = tenant
        self.session = session
        self.prompt_tokens = prompt_tokens
        self.policy = policy
        self.worker = chosen.name
        self.seconds = chosen.seconds
        self.reason = reason
        self.home = home
        self.shadow = shadow
        self.outcome = Outcome()
        self._candidates: Sequence[Candidate] | None = candidates
        self._names: tuple[str, ...] = ()
        self._packed: Sequence[float] = ()

    @property
    def num_candidates(self) -> int:
        return len(self._names) if self._candidates is None else len(self._candidates)

    def candidates(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        """(worker, matched tokens, seconds by term) of each candidate."""
        if self._candidates is not None:
            for c in self._candidates:
                yield c.name, c.matched_tokens, {term: getattr(c, term) for term in TERMS}
            return
        for position, name in enumerate(self._names):
            row = self._packed[position * _WIDTH : (position + 1) * _WIDTH]
            yield name, int(row[0]), dict(zip(TERMS, row[1:], strict=True))

    def best_other(self) -> float | None:
        """The lowest estimate of the time to the first token among the workers that were not chosen."""
        best, chosen = None, self.worker
        for name, _, queue, transfer, prefill, interference, _, _, _, _, _, _ in self._candidates or ():
            if name != chosen:
                seconds = queue + transfer + prefill + interference
                if best is None or seconds < best:
                    best = seconds
        return best

    def seal(self) -> None:
        """Nothing is asked of the candidates any more but to be shown."""
        candidates = self._candidates
        if candidates is None or len(candidates) <= _FEW:
            return
        self._candidates = None
        self._packed = packed = array("d")
        for candidate in candidates:
            packed.extend(candidate.estimates())
        self._names = tuple([candidate.name for candidate in candidates])


class RouteObserver(Protocol):
    """Told of decisions, on the event loop."""

    def decided(self, decision: Decision) -> None:
        """It was made."""

    def concluded(self, decision: Decision) -> None:
        """Its outcome is known."""


class RouteLog:
    """The last decisions; the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        self._ring.append(decision)

    def newest(
        self, *, tenant: str | None = None, session: str | None = None, worker: str | None = None, request_id: str | None = None
    ) -> Iterator[Decision]:
        """The newest first; of one tenant (None: of all), and with each filter that is given."""
        for decision in reversed(self._ring):
            if (
                (tenant is None or decision.tenant == tenant)
                and (session is None or decision.session == session)
                and (worker is None or decision.worker == worker)
                and (request_id is None or decision.request_id == request_id)
            ):
                yield decision
