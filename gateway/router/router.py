"""The router: residency, load and memory of past choices in, a worker and a receipt out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.router.config import RouterConfig
from gateway.router.costs import Candidate, WorkerLoad
from gateway.router.memory import Homes, RecentWork
from gateway.router.policies import RouteRequest, make_policy
from gateway.turn import Receipt, SessionRef
from prefix_cache.hashing import BlockHash
from prefix_cache.index import Prediction, ResidencyIndex

# A turn without a session is recognised by the block its predecessor's prompt ended with. That block lies before the end of
# what is resident by as many blocks as the predecessor generated; looking further back than this would not pay.
_MAX_GENERATED_BLOCKS = 512

HomeKey = tuple[str, str] | tuple[str, BlockHash]
"""(tenant, session), or (tenant, last block of the last prompt) for a session without a name."""


class Route:
    """A choice that was made, until its prompt is computed or given up.

    Every route must end by `computed`, `failed` or `abandoned`; the first counts, later ones do nothing.
    """

    __slots__ = ("_key", "_prediction", "_router", "prompt_tokens", "receipt")

    def __init__(
        self,
        router: Router,
        receipt: Receipt,
        prompt_tokens: int,
        prediction: Prediction | None,
        key: HomeKey | None,
    ) -> None:
        self._router: Router | None = router
        self.receipt = receipt
        self.prompt_tokens = prompt_tokens
        self._prediction = prediction
        self._key = key

    def computed(self, cached_tokens: int) -> None:
        """The first token has come: its KV is there, events will say so."""
        router, self._router = self._router, None
        if router is not None:
            router._computed(self.receipt.worker, self._prediction, max(self.prompt_tokens - cached_tokens, 0))

    def abandoned(self) -> None:
        """Its client has gone: it will not be computed, and nothing is expected any more."""
        router, self._router = self._router, None
        if router is not None and self._prediction is not None:
            router.index.retract(self._prediction)

    def failed(self) -> None:
        """The worker failed it: nothing is expected any more, and the session does not live there."""
        router = self._router
        self.abandoned()
        if router is not None and self._key is not None:
            router._homes.drop(self._key)


class Router:
    """Chooses among workers. Single-threaded; `clock` gives monotonic seconds.

    The index is the caller's: whoever feeds it KV events. Workers are known by the same names there and in the loads.
    """

    def __init__(self, config: RouterConfig, index: ResidencyIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.index = index
        self._clock = clock
        self._policy = make_policy(config)
        self._homes = Homes(config.max_homes, config.home_ttl)
        self._recent = RecentWork(config.spread_half_life)
        self._chosen: dict[str, int] = {}
        self._choices = 0

    def route(
        self,
        *,
        digests: Sequence[BlockHash],
        prompt_tokens: int,
        block_size: int,
        session: SessionRef,
        loads: Sequence[WorkerLoad],
    ) -> Route:
        """Places a turn on one of `loads` (at least one) and books what is to be expected there.

        `digests` are the block hashes of the prompt's full blocks. The receipt's `matched_tokens` is what the index promises.
        """
        now = self._clock()
        self.index.expire(now)
        matches = self.index.lookup(digests)
        named = (session.tenant, session.key) if session.key is not None else None
        home = self._home(named, session.tenant, digests, matches, now)
        candidates = [
            Candidate(
                load=load,
                matched_tokens=min(matches.get(load.name, 0) * block_size, prompt_tokens),
                recent_work=self._recent.get(load.name, now),
                idle_rank=self._chosen.get(load.name, 0),
            )
            for load in loads
        ]
        if len(candidates) == 1:
            chosen, reason = candidates[0], "only"
        else:
            chosen, reason = self._policy.choose(RouteRequest(prompt_tokens, named, home), candidates)
        self._choices += 1
        self._chosen[chosen.name] = self._choices
        key: HomeKey | None = named if named is not None else (session.tenant, digests[-1]) if digests else None
        if key is not None:
            self._homes.put(key, chosen.name, now)
        prediction = self.index.predict(chosen.name, digests[matches.get(chosen.name, 0) :])
        receipt = Receipt(chosen.name, reason, chosen.matched_tokens, len(candidates), chosen.load.instance)
        return Route(self, receipt, prompt_tokens, prediction, key)

    def generated(self, worker: str, tokens: int) -> None:
        """A worker has produced this many tokens. Workers that were forgotten stay so."""
        if worker in self._chosen:
            self._recent.add(worker, tokens, self._clock())

    def forget(self, worker: str) -> None:
        """A worker is gone. Sessions that lived there are placed anew when they come back."""
        self._recent.forget(worker)
        self._chosen.pop(worker, None)

    def _home(
        self,
        named: tuple[str, str] | None,
        tenant: str,
        digests: Sequence[BlockHash],
        matches: dict[str, int],
        now: float,
    ) -> str | None:
        if named is not None:
            return self._homes.get(named, now)
        deepest = max(matches.values(), default=0)
        for position in range(deepest - 1, max(deepest - _MAX_GENERATED_BLOCKS, 0) - 1, -1):
            home = self._homes.get((tenant, digests[position]), now)
            if home is not None:
                return home
        return None

    def _computed(self, worker: str, prediction: Prediction | None, work: int) -> None:
        now = self._clock()
        if worker in self._chosen:
            self._recent.add(worker, work, now)
        if prediction is not None:
            self.index.settle(prediction, now + self.config.predicted_ttl)
