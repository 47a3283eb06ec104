"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["prefix", "longest_prefix", "round_robin", "session", "least_load", "random"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the `prefix` policy weighs things (docs/routing.md derives the formula), and the bounds of what it remembers.

    `shadow_policy`: scored beside the live one, never obeyed.
    `opportunity`: what a second of prefill costs everybody else, as a share of what it costs this turn.
    `eviction`: weight of the seconds that others lose when their blocks make room for this turn's.
    `hysteresis`: share of what a session has at its home (what its hits save, and a quarter of its prompt's prefill) by which
    another worker must be cheaper before it leaves.
    `spread`: weight of a worker's recent work when a session is placed for the first time; 0 places by cost alone.
    `spread_half_life`: seconds after which recent work counts half.
    `predicted_ttl`: seconds for which a computed prompt counts as resident before KV events confirm it.
    `max_indexed_blocks`: blocks remembered of all workers together, the least recently used going first.
    `max_predicted_blocks`, `max_homes`, `home_ttl` (seconds), `max_receipts`: further bounds on memory.
    `seed`: of the random policy. `agree`: other gateways route to the same workers, so where the estimates cannot tell workers
    apart a new session goes where all of them would send it; None: with several processes, or a shared Redis.
    """

    policy: PolicyName = "prefix"
    shadow_policy: PolicyName | None = None
    opportunity: float = 1.0
    eviction: float = 1.0
    hysteresis: float = 1.0
    spread: float = 0.5
    spread_half_life: float = 60.0
    predicted_ttl: float = 5.0
    max_indexed_blocks: int = 4_000_000
    max_predicted_blocks: int = 1_000_000
    max_homes: int = 100_000
    home_ttl: float = 3600.0
    max_receipts: int = 1000
    seed: int | None = None
    agree: bool | None = None

    def __post_init__(self) -> None:
        for name in ("policy", "shadow_policy"):
            value = getattr(self, name)
            if value not in POLICIES and not (value is None and name == "shadow_policy"):
                raise ValueError(f"router.{name} '{value}' is not known; choose one of {', '.join(POLICIES)}")
        for name in ("opportunity", "eviction", "hysteresis", "spread"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"router.{name} must be zero or more, not {getattr(self, name)}")
        for name in (
            "spread_half_life",
            "predicted_ttl",
            "home_ttl",
            "max_indexed_blocks",
            "max_predicted_blocks",
            "max_homes",
            "max_receipts",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name} must be positive, not {getattr(self, name)}")
