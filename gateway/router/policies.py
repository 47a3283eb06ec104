"""How to choose among candidates. A policy gets everything that is known and uses what it is about."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gateway.router.config import PolicyName, RouterConfig
from gateway.router.costs import Candidate, Weights, cheapest
from gateway.router.rendezvous import score, session_key


class RouteRequest(NamedTuple):
    """One turn to be placed. `session` names its session (None: unknown); `home` is where its last turn ran. `agreed`: for new
    sessions, the score of a worker in which all gateways agree (gateway.router.rendezvous); None where there is but one."""

    prompt_tokens: int
    session: tuple[str, str] | None = None
    home: str | None = None
    agreed: Callable[[str], int] | None = None


class Policy(Protocol):
    """Chooses one of at least two candidates and says why, in one of a few fixed words."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]: ...


class PrefixPolicy:
    """Lowest cost in seconds (gateway/router/costs.py).

    Reasons: `prefix`, it holds more of the prompt than another; `home`, the session comes from there; `spread`, a new session
    goes where less was done lately although another holds more of it; `load`, soonest otherwise.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._weights = Weights(config.opportunity, config.eviction, config.hysteresis, config.spread)

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        home = request.home
        if home is not None and home not in [candidate[0] for candidate in candidates]:
            home = None
        chosen = cheapest(candidates, home, self._weights, request.agreed)
        matches = [candidate[1] for candidate in candidates]
        longest, matched = max(matches), chosen.matched_tokens
        if matched == longest and matched > min(matches):
            return chosen, "prefix"
        if chosen.name == home:
            return chosen, "home"
        if home is None and matched < longest:
            lightest = min(c.queue + c.interference for c in candidates if c.matched_tokens == longest)
            if chosen.queue + chosen.interference >= lightest:
                return chosen, "spread"
        return chosen, "load"


class LongestPrefixPolicy:
    """Whoever holds most of the prompt, however long one waits there; of equals the least loaded. Reasons: `prefix`,
    `least_load` when nobody holds any of it."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        longest = max(candidate.matched_tokens for candidate in candidates)
        return _least_loaded([c for c in candidates if c.matched_tokens == longest]), "prefix" if longest else "least_load"


class RoundRobinPolicy:
    """Each in turn, whoever asks. Reason: `round_robin`."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return min(candidates, key=lambda c: (c.idle_rank, c.name)), "round_robin"


class SessionPolicy:
    """Sticky by rendezvous hashing of tenant and session: instances agree, and a lost worker moves only its own sessions.

    The pair is hashed as two parts, so that no two pairs are confused. A turn that names no session stays at its home, and
    without one goes to the least loaded. Reasons: `session`, `least_load`.
    """

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        if request.session is not None:
            key = session_key(request.session)
            return max(candidates, key=lambda c: (score(key, c.name), c.name)), "session"
        for candidate in candidates:
            if candidate.name == request.home:
                return candidate, "session"
        return _least_loaded(candidates), "least_load"


class LeastLoadPolicy:
    """The least loaded, whoever asks. Reason: `least_load`."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return _least_loaded(candidates), "least_load"


class RandomPolicy:
    """Any. Reason: `random`."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return self._random.choice(candidates), "random"


def make_policy(name: PolicyName, config: RouterConfig) -> Policy:
    """The policy of this name."""
    makers: dict[PolicyName, Policy] = {
        "prefix": PrefixPolicy(config),
        "longest_prefix": LongestPrefixPolicy(),
        "round_robin": RoundRobinPolicy(),
        "session": SessionPolicy(),
        "least_load": LeastLoadPolicy(),
        "random": RandomPolicy(config.seed),
    }
    return makers[name]


def _least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (c.queue + c.interference, c.requests, c.idle_rank, c.name))
