"""The cost of giving a turn to a worker, in tokens of prefill. Pure.

    cost = queued                                    what stands before it
         + (1 + opportunity) * (prompt - matched)    what it must compute itself, and what that takes from others
         + running_weight * in flight                decoding neighbours share every step
         + overflow_weight * beyond max_concurrency  turns that must end before it may begin
         + spread * recent work                      only when a session is placed for the first time
         - hysteresis * prompt                       only for the worker the session comes from

Residency and load are in one unit and add up: there is no threshold at which affinity is thrown away, so a long conversation
leaves its worker exactly when waiting there costs more than computing everything elsewhere. A prompt that nobody holds costs
the same everywhere, and load decides; how full a worker's cache is plays no part. A prefix that everybody shares is worth its
own length once, and recent work soon outweighs that when the next session is born: shared system prompts spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What is known of a candidate's load. `queued_tokens`: prompt tokens to be computed there before a newcomer's.
    `instance`: its own id, which says nothing of its load."""

    name: str
    queued_tokens: float = 0.0
    requests: int = 0
    max_concurrency: int = 1
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policies see it. `matched_tokens`: the beginning of this prompt that it holds or soon will.

    `recent_work`: decaying count of tokens it computed. `idle_rank`: lower for workers not chosen for longer.
    """

    load: WorkerLoad
    matched_tokens: int
    recent_work: float
    idle_rank: int

    @property
    def name(self) -> str:
        return self.load.name


def pressure(load: WorkerLoad, config: RouterConfig) -> float:
    """The part of the cost that does not depend on the turn."""
    overflow = max(0, load.requests + 1 - load.max_concurrency)
    return load.queued_tokens + config.running_weight * load.requests + config.overflow_weight * overflow


def cost(candidate: Candidate, prompt_tokens: int, home: str | None, config: RouterConfig) -> float:
    """Expected tokens of work before the first token, with the terms above. `home` None: the session is new."""
    work = max(prompt_tokens - candidate.matched_tokens, 0)
    total = pressure(candidate.load, config) + (1 + config.opportunity) * work
    if home is None:
        return total + config.spread * candidate.recent_work
    return total - config.hysteresis * prompt_tokens if candidate.name == home else total


def cheapest(candidates: Sequence[Candidate], prompt_tokens: int, home: str | None, config: RouterConfig) -> Candidate:
    """The candidate of the lowest cost; of equals the session's home, then the longest match, then whoever rested longest."""
    return min(
        candidates,
        key=lambda c: (
            cost(c, prompt_tokens, home, config),
            c.name != home,
            -c.matched_tokens,
            c.idle_rank,
            c.name,
        ),
    )
