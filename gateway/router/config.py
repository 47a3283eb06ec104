"""Settings of the router. Costs are in tokens of prefill: the work a worker must do before the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["prefix", "round_robin", "session", "least_load", "random"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the `prefix` policy weighs things (docs/routing.md derives the formula), and the bounds of what it remembers.

    `opportunity`: what a token of prefill costs everybody else, as a share of what it costs this turn.
    `running_weight`: tokens of prefill that one request in flight delays a newcomer by.
    `overflow_weight`: the same for each request beyond a worker's `max_concurrency`.
    `hysteresis`: share of the prompt by which another worker must be cheaper before a session leaves its home.
    `spread`: weight of a worker's recent work when a session is placed for the first time; 0 places by cost alone.
    `spread_half_life`: seconds after which recent work counts half.
    `predicted_ttl`: seconds for which a computed prompt counts as resident before KV events confirm it.
    `max_indexed_blocks`: blocks remembered of one worker.
    `max_predicted_blocks`, `max_homes`, `home_ttl` (seconds): further bounds on memory.
    `seed`: of the random policy.
    """

    policy: PolicyName = "prefix"
    opportunity: float = 1.0
    running_weight: float = 32.0
    overflow_weight: float = 512.0
    hysteresis: float = 0.25
    spread: float = 0.5
    spread_half_life: float = 60.0
    predicted_ttl: float = 5.0
    max_indexed_blocks: int = 1_000_000
    max_predicted_blocks: int = 1_000_000
    max_homes: int = 100_000
    home_ttl: float = 3600.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"router policy '{self.policy}' is not known; choose one of {', '.join(POLICIES)}")
        for name in ("opportunity", "running_weight", "overflow_weight", "hysteresis", "spread"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"router.{name} must be zero or more, not {getattr(self, name)}")
        for name in (
            "spread_half_life",
            "predicted_ttl",
            "home_ttl",
            "max_indexed_blocks",
            "max_predicted_blocks",
            "max_homes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name} must be positive, not {getattr(self, name)}")
