"""What it costs to give a turn to a worker, in seconds. Pure.

    seconds = queue                what must be computed there before it, less what of it is done; slots and KV to become free
            + transfer             bringing hits from host, disk or afar to the device
            + prefill              the rest of the prompt (gateway.router.estimator)
            + interference         what its steps take in any case, the way there, and the sequences that generate there

    cost    = seconds              the expected time to the first token, and beside it:
            + opportunity * others         what computing keeps others from: prefill * (1 + arrivals during it / 2)
            + eviction                     what others will compute again because their blocks made room
            + spread * recent work         only when a session is placed for the first time
            - hysteresis * stay            only for the session's home: what its hits save, and a quarter of its prefill

Everything is in one unit and adds up: there is no threshold at which affinity is thrown away, so a long conversation leaves its
worker exactly when waiting there costs more than computing everything elsewhere. A prompt that nobody holds costs the same
everywhere, and load decides. A prefix that everybody shares is worth its own length once, and recent work soon outweighs that
when the next session is born: shared system prompts spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

_NAME = attrgetter("name")
_EQUAL_SECONDS = 0.001
_EQUAL_SHARE = 0.02  # of the lowest cost: what is measured varies by more


@dataclass(slots=True)
class WorkerLoad:
    """What is known of a candidate's load. `queued_tokens`: prompt tokens to be computed there before a newcomer's, this
    gateway's own among them. `requests`: waiting and running. `kv_tokens`: how many its KV memory holds; 0: not known.
    `instance`: its own id, which says nothing of its load. `held_tokens`: prompt tokens that wait there for sessions in
    progress, so that turns of those pass them."""

    name: str
    queued_tokens: float = 0.0
    requests: int = 0
    max_concurrency: int = 1
    instance: str = ""
    kv_tokens: int = 0
    held_tokens: int = 0


class Candidate(NamedTuple):
    """A worker as the policies see it; all but the tokens, the rank and the requests is seconds. A tuple, as there is one for
    every worker at every decision.

    `matched_tokens`: the beginning of this prompt that it holds or soon will. `others`: what those wait who come while it is
    computed. `recent_work`: what the worker computed lately, decaying (looked at for new sessions only). `stay`: what
    the session loses by leaving (for its home only). `idle_rank`: lower for workers not chosen for longer.
    `requests`: in flight there.
    """

    name: str
    matched_tokens: int = 0
    queue: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    interference: float = 0.0
    others: float = 0.0
    eviction: float = 0.0
    recent_work: float = 0.0
    stay: float = 0.0
    idle_rank: int = 0
    requests: int = 0

    @property
    def seconds(self) -> float:
        """Expected until the first token."""
        return self.queue + self.transfer + self.prefill + self.interference

    def estimates(self) -> tuple[float, ...]:
        """`matched_tokens`, and the seconds in the order of the fields."""
        return self[1:10]


@dataclass(frozen=True, slots=True)
class Weights:
    """The factors of the formula above (gateway.router.config says what they mean)."""

    opportunity: float = 1.0
    eviction: float = 1.0
    hysteresis: float = 1.0
    spread: float = 0.5


def costs(candidates: Sequence[Candidate], home: str | None, weights: Weights) -> list[float]:
    """Seconds for each, with the terms above. `home` None: the session is new."""
    others, evict, spread = weights.opportunity, weights.eviction, weights.spread if home is None else 0.0
    found = [
        queue + transfer + prefill + interference + others * lost + evict * eviction + spread * work
        for _, _, queue, transfer, prefill, interference, lost, eviction, work, _, _, _ in candidates
    ]
    if home is not None:
        for position, candidate in enumerate(candidates):
            if candidate.name == home:
                found[position] -= weights.hysteresis * candidate.stay
    return found


def cheapest(
    candidates: Sequence[Candidate], home: str | None, weights: Weights, agreed: Callable[[str], int] | None = None
) -> Candidate:
    """The candidate of the lowest cost; of those that the estimates cannot tell apart the session's home, then the longest
    match, then the one with the highest `agreed` score, or else whoever rested longest."""
    found = costs(candidates, home, weights)
    lowest = min(found)
    bound = lowest + max(_EQUAL_SECONDS, _EQUAL_SHARE * lowest)
    equals = [candidate for candidate, value in zip(candidates, found, strict=True) if value <= bound]
    if len(equals) == 1:
        return equals[0]
    if home is not None:
        for candidate in equals:
            if candidate.name == home:
                return candidate
    # For a new session all of many workers may be equal: one after another is cheaper than a key of everything for each.
    longest = max([candidate.matched_tokens for candidate in equals])
    equals = [candidate for candidate in equals if candidate.matched_tokens == longest]
    if agreed is not None and home is None:
        return min(equals, key=lambda c: (-agreed(c.name), c.name))
    rested = min([candidate.idle_rank for candidate in equals])
    return min([candidate for candidate in equals if candidate.idle_rank == rested], key=_NAME)
