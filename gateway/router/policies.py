"""How to choose among candidates. A policy gets everything that is known and uses what it is about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from gateway.router.config import PolicyName, RouterConfig
from gateway.router.costs import Candidate, cheapest, pressure


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One turn to be placed. `session` names its session (None: unknown); `home` is where its last turn ran."""

    prompt_tokens: int
    session: tuple[str, str] | None = None
    home: str | None = None


class Policy(Protocol):
    """Chooses one of at least two candidates and says why, in one of a few fixed words."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]: ...


class PrefixPolicy:
    """Fewest expected tokens of work before the first token (gateway/router/costs.py).

    Reasons: `prefix`, it holds more of the prompt than another; `home`, the session comes from there; `spread`, a new session
    goes where less was done lately although another holds more of it; `load`, least work otherwise.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        home = request.home if any(c.name == request.home for c in candidates) else None
        chosen = cheapest(candidates, request.prompt_tokens, home, self._config)
        matches = [c.matched_tokens for c in candidates]
        if chosen.matched_tokens == max(matches) > min(matches):
            return chosen, "prefix"
        if chosen.name == home:
            return chosen, "home"
        if home is None and chosen.matched_tokens < max(matches):
            lightest = min(pressure(c.load, self._config) for c in candidates if c.matched_tokens == max(matches))
            if pressure(chosen.load, self._config) >= lightest:
                return chosen, "spread"
        return chosen, "load"


class RoundRobinPolicy:
    """Each in turn, whoever asks. Reason: `round_robin`."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return min(candidates, key=lambda c: (c.idle_rank, c.name)), "round_robin"


class SessionPolicy:
    """Sticky by rendezvous hashing of tenant and session: instances agree, and a lost worker moves only its own sessions.

    The pair is hashed as two parts, so that no two pairs are confused. A turn that names no session stays at its home, and
    without one goes to the least loaded. Reasons: `session`, `least_load`.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        if request.session is not None:
            key = "".join(f"{len(part)}:{part}" for part in request.session)
            return max(candidates, key=lambda c: (_rendezvous(key, c.name), c.name)), "session"
        for candidate in candidates:
            if candidate.name == request.home:
                return candidate, "session"
        return _least_loaded(candidates, self._config), "least_load"


class LeastLoadPolicy:
    """The least loaded, whoever asks. Reason: `least_load`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return _least_loaded(candidates, self._config), "least_load"


class RandomPolicy:
    """Any. Reason: `random`."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        return self._random.choice(candidates), "random"


def make_policy(config: RouterConfig) -> Policy:
    makers: dict[PolicyName, Policy] = {
        "prefix": PrefixPolicy(config),
        "round_robin": RoundRobinPolicy(),
        "session": SessionPolicy(config),
        "least_load": LeastLoadPolicy(config),
        "random": RandomPolicy(config.seed),
    }
    return makers[config.policy]


def _least_loaded(candidates: Sequence[Candidate], config: RouterConfig) -> Candidate:
    return min(candidates, key=lambda c: (pressure(c.load, config), c.idle_rank, c.name))


def _rendezvous(key: str, worker: str) -> int:
    return int(xxhash.xxh3_64_intdigest(f"{key}|{worker}".encode("utf-8", "surrogatepass")))
