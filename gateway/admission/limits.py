"""How much a key may use: requests and tokens a minute. One key's use is no other key's concern.

Tokens are what a turn has computed: prompt tokens that were not cached, and generated ones. An agent that sends its history
with every turn so pays for what is new. What a turn will take is estimated when it begins, and settled when it has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from gateway.admission.buckets import Buckets, Taken
from gateway.admission.shared_buckets import SharedBuckets
from gateway.auth import Caller
from gateway.turn import TurnError


class Charge:
    """Tokens that a turn took from its key. `settle` it once with what it used; without, the estimate stays."""

    __slots__ = ("_caller", "_limits", "_taken")

    def __init__(self, limits: RateLimits, caller: Caller, taken: float) -> None:
        self._limits: RateLimits | None = limits
        self._caller = caller
        self._taken = taken

    async def settle(self, used: float) -> None:
        """Idempotent."""
        limits, self._limits = self._limits, None
        if limits is not None and self._taken != used:
            await limits._give(self._caller, self._taken - used)


class RateLimits:
    """The limits of all keys. `refused` counts requests that came too soon, by what there was too much of."""

    def __init__(self, local: Buckets, shared: SharedBuckets | None = None) -> None:
        self._local = local
        self._shared = shared
        self.refused: Counter[str] = Counter()

    async def request(self, caller: Caller) -> Mapping[str, str]:
        """Counts a request. Gives headers that say what is left. Raises TurnError 429."""
        limit = caller.requests_per_minute
        if not limit:
            return {}
        taken = await self._take("requests", caller, 1.0, limit)
        return _headers("requests", limit, taken)

    async def tokens(self, caller: Caller, estimate: float) -> tuple[Charge | None, Mapping[str, str]]:
        """Takes what a turn is expected to use. Raises TurnError 429."""
        limit = caller.tokens_per_minute
        if not limit:
            return None, {}
        taken = await self._take("tokens", caller, estimate, limit)
        return Charge(self, caller, estimate), _headers("tokens", limit, taken)

    async def _take(self, what: str, caller: Caller, cost: float, limit: float) -> Taken:
        name = _name(what, caller)
        taken = self._local.take(name, cost, limit) if self._shared is None else await self._shared.take(name, cost, limit)
        if taken.wait > 0:
            self.refused[what] += 1
            raise TurnError(
                429,
                "rate_limit_exceeded",
                f"This API key may use {limit:.15g} {what} a minute, and has for now. Try again in {math.ceil(taken.wait)} s.",
                retry_after=taken.wait,
            )
        return taken

    async def _give(self, caller: Caller, amount: float) -> None:
        name, limit = _name("tokens", caller), caller.tokens_per_minute
        if self._shared is None:
            self._local.give(name, amount, limit)
        else:
            await self._shared.give(name, amount, limit)


def _name(what: str, caller: Caller) -> str:
    return f"{what}:{caller.key}"


def _headers(what: str, limit: float, taken: Taken) -> dict[str, str]:
    """As OpenAI's API names them."""
    return {
        f"x-ratelimit-limit-{what}": str(math.floor(limit)),
        f"x-ratelimit-remaining-{what}": str(max(math.floor(taken.left), 0)),
        f"x-ratelimit-reset-{what}": f"{max(limit - taken.left, 0.0) * 60 / limit:.3f}s",
    }
