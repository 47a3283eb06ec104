"""The router: residency, load and memory of past choices in, a worker and a receipt out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from gateway.router.arrivals import Arrivals
from gateway.router.config import RouterConfig
from gateway.router.costs import Candidate, WorkerLoad
from gateway.router.estimator import STEP_TOKENS, Coefficients, Observation
from gateway.router.memory import Homes
from gateway.router.peers import Peers
from gateway.router.policies import Policy, RouteRequest, make_policy
from gateway.router.receipts import Decision, Result, RouteLog, RouteObserver, Shadow
from gateway.router.rendezvous import prompt_key, score, session_key
from gateway.router.reuse import ReuseModel
from gateway.router.route import Route
from gateway.router.standing import Standing
from gateway.turn import Receipt, SessionRef
from prefix_cache.hashing import BlockHash
from prefix_cache.index import Hits, Prediction, ResidencyIndex
from prefix_cache.walking import reader

# A turn without a session is recognised by the block its predecessor's prompt ended with. That block lies before the end of
# what is resident by as many blocks as the predecessor generated; looking further back than this would not pay.
_MAX_GENERATED_BLOCKS = 512

_STAY = 0.25  # of a prompt's prefill: for what a session is kept at its home when its KV is gone

_FULL = 0.95  # of a worker's KV memory: from here on a new block costs an old one

HomeKey = tuple[str, str] | tuple[str, BlockHash]
"""(tenant, session), or (tenant, last block of the last prompt) for a session without a name."""


class Router:
    """Chooses among workers. Single-threaded; `clock` gives monotonic seconds.

    The index is the caller's: whoever feeds it KV events. Workers are known by the same names there and in the loads.
    """

    def __init__(
        self,
        config: RouterConfig,
        index: ResidencyIndex,
        clock: Callable[[], float] = time.monotonic,
        *,
        observer: RouteObserver | None = None,
    ) -> None:
        self.config = config
        self.index = index
        self.log = RouteLog(config.max_receipts)
        self.now = clock
        self._observer = observer
        self._policy = make_policy(config.policy, config)
        self._shadow: Policy | None = None if config.shadow_policy is None else make_policy(config.shadow_policy, config)
        self._homes = Homes(config.max_homes, config.home_ttl)
        self._reuse = ReuseModel()
        self._peers = Peers()
        self._standings: dict[str, Standing] = {}
        self._arrivals = Arrivals(config.spread_half_life)
        self._choices = 0
        self._to_refresh: list[str] = []

    def route(
        self,
        *,
        digests: Sequence[BlockHash],
        prompt_tokens: int,
        block_size: int,
        session: SessionRef,
        loads: Sequence[WorkerLoad],
        request_id: str = "",
        last_instance: str = "",
    ) -> Route:
        """Places a turn on one of `loads` (at least one) and books what is to be expected there.

        `digests` are the block hashes of the prompt's full blocks. The receipt's `matched_tokens` is what the index promises.
        `last_instance`: the worker of the session's last turn by its own id, where its ledger says so; whichever gateway served
        that turn.
        """
        now = self.now()
        index = self.index
        index.expire(now)
        self._arrivals.add(now)
        matches, lower = index.lookup_tiers(digests)
        named = (session.tenant, session.key) if session.key is not None else None
        home = self._home(named, session.tenant, digests, matches, now)
        if last_instance and (home is None or self.config.agree):
            # What this gateway remembers may be older than what another one has done since.
            home = next((load.name for load in loads if load.instance == last_instance), home)
        candidates = self._candidates(loads, matches, lower, prompt_tokens, block_size, home, now)
        agreed = self._agreed(named, session.tenant, digests, loads) if self.config.agree and home is None else None
        request = RouteRequest(prompt_tokens, named, home, agreed)
        if len(candidates) == 1:
            chosen, reason = candidates[0], "only"
        else:
            chosen, reason = self._policy.choose(request, candidates)
        standing = self._standings[chosen.name]
        load = next(load for load in loads if load.name == chosen.name)
        standing.lives(load.instance)
        self._choices += 1
        standing.rank = self._choices
        key: HomeKey | None = named if named is not None else (session.tenant, digests[-1]) if digests else None
        if key is not None:
            self._homes.put(key, chosen.name, now)
        blocks = matches.get(chosen.name, 0)
        promised = index.reported(chosen.name, digests, blocks) * block_size
        prediction = index.predict(chosen.name, digests, blocks)
        decision = Decision(
            request_id=request_id,
            tenant=session.tenant,
            session=session.key,
            prompt_tokens=prompt_tokens,
            policy=self.config.policy,
            chosen=chosen,
            reason=reason,
            home=home,
            candidates=candidates,
            shadow=self._shadowed(request, candidates),
        )
        self.log.add(decision)
        if self._observer is not None:
            self._observer.decided(decision)
        return Route(
            self,
            standing,
            Receipt(chosen.name, reason, chosen.matched_tokens, len(candidates), load.instance, chosen.seconds, decision),
            decision,
            digests=digests,
            block_size=block_size,
            prompt_tokens=prompt_tokens,
            hits=lower.get(chosen.name),
            promised=min(promised, prompt_tokens),
            prediction=prediction,
            key=key,
            decoding=max(load.requests - len(standing.pending), 0),
            now=now,
        )

    def generated(self, worker: str, tokens: int) -> None:
        """A worker has produced this many tokens. Workers that were forgotten stay so."""
        standing = self._standings.get(worker)
        if standing is not None:
            standing.worked(tokens * standing.coefficients.token, tokens, self.now())

    def forget(self, worker: str) -> None:
        """A worker is gone. Sessions that lived there are placed anew when they come back."""
        standing = self._standings.pop(worker, None)
        if standing is not None:
            standing.left()

    def standings(self) -> Mapping[str, Standing]:
        """What is known of each worker that was a candidate."""
        return self._standings

    # What routes tell

    def computed(self, prediction: Prediction | None) -> None:
        """A prompt was computed."""
        if prediction is not None:
            self.index.settle(prediction, self.now() + self.config.predicted_ttl)

    def compare(self, route: Route, promised: int, cached: int, digests: Sequence[BlockHash], block_size: int) -> None:
        """A worker has said what of a prompt it had: is that what its events said?"""
        slack = 2 * block_size
        if promised - cached > slack:
            if not self.index.check_order(route.standing.name, digests[: promised // block_size]):
                return  # It gives up beginnings before ends, which was not known: the promise was the lookup's mistake.
            # What was evicted while the turn waited is no contradiction: the index has heard of it.
            promised = min(promised, self.index.reported(route.standing.name, digests, promised // block_size) * block_size)
        route.standing.trust.compare(promised, cached, slack)

    def learns(self, standing: Standing) -> bool:
        """Whether `observed` and `delayed` are to be told of a turn that ends now."""
        return standing.teaches(self.now())

    def observed(self, standing: Standing, seen: Observation, apart: bool = True) -> None:
        """A worker has said how long a prompt took. `apart`: at another time than what it said before (Standing.apart)."""
        now = self.now()
        self._peers.estimator.observe(seen)
        standing.observed(seen, now, apart)
        # What a worker said long ago, or never, gives way to what its peers say now: one worker's turn each time.
        names = self._to_refresh or list(self._standings)
        self._to_refresh = names
        other = self._standings.get(names.pop()) if names else None
        if other is not None:
            other.refresh(now)

    def delayed(self, standing: Standing, seconds: float, apart: bool = True) -> None:
        """A first token came so much later than by the worker's own account. It may be less than nothing: clocks differ."""
        self._peers.way.add(seconds)
        if apart:
            standing.delayed(seconds, self.now())

    def homeless(self, key: HomeKey) -> None:
        """A session's worker has failed it."""
        self._homes.drop(key)

    def ended(self, decision: Decision, result: Result) -> None:
        """A turn is over."""
        outcome = decision.outcome
        outcome.result = result
        best = decision.best_other()
        if outcome.time_to_first_token is not None:
            outcome.regret = 0.0 if best is None else max(0.0, outcome.time_to_first_token - best)
        decision.seal()
        if self._observer is not None:
            self._observer.concluded(decision)

    # Inside

    def _candidates(
        self,
        loads: Sequence[WorkerLoad],
        matches: Mapping[str, int],
        lower: Mapping[str, Hits],
        prompt_tokens: int,
        block_size: int,
        home: str | None,
        now: float,
    ) -> list[Candidate]:
        # The hot loop of the gateway: with 64 workers each line of it runs 64 times for every request.
        standings, held, make = self._standings, self.index.held, tuple.__new__
        arrivals = self._arrivals.rate(now) / len(loads)
        alike, way = self._peers.estimator.coefficients, self._peers.way.seconds
        candidates: list[Candidate] = []
        for load in loads:
            name, requests, kv_tokens = load.name, load.requests, load.kv_tokens
            standing = standings.get(name)
            if standing is None:
                standing = standings[name] = Standing(name, self._peers, self.config.spread_half_life, now)
            fixed, token, pair, neighbour, _, _, _ = k = standing.own or alike
            matched = matches.get(name, 0) * block_size
            if standing.trust.level:
                matched = standing.trust.believed(matched)
            new = prompt_tokens - matched
            work = new * (token + pair * (matched + 0.5 * new))
            transfer = _transfer(lower[name], k, matched, block_size) if lower and name in lower else 0.0
            eviction = 0.0
            if kv_tokens and name in held and held[name].blocks * block_size >= _FULL * kv_tokens:
                age = standing.turnover(kv_tokens, now)
                eviction = new * token * self._reuse.probability(age) if age < math.inf else 0.0
            queue = standing.queue(load, prompt_tokens, now, token)
            if load.held_tokens and name == home:
                queue -= min(queue, load.held_tokens * token)
            candidates.append(
                make(
                    Candidate,
                    (
                        name,
                        matched,
                        queue,
                        transfer,
                        work,
                        (way if standing.latency_factor == 1.0 else standing.latency)
                        + fixed
                        + neighbour * (requests - len(standing.pending)) * (1.0 + new / STEP_TOKENS),
                        work * (1.0 + 0.5 * arrivals * work),
                        eviction,
                        standing.recent_work(now) if home is None else 0.0,
                        (1.0 + _STAY) * k.work(prompt_tokens, 0) - work if name == home else 0.0,
                        standing.rank,
                        requests,
                    ),
                )
            )
        return candidates

    def _shadowed(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Shadow | None:
        if self._shadow is None or self.config.shadow_policy is None or len(candidates) < 2:
            return None
        chosen, reason = self._shadow.choose(request, candidates)
        return Shadow(self.config.shadow_policy, chosen.name, reason, chosen.seconds)

    def _agreed(
        self, named: tuple[str, str] | None, tenant: str, digests: Sequence[BlockHash], loads: Sequence[WorkerLoad]
    ) -> Callable[[str], int] | None:
        key = session_key(named) if named is not None else prompt_key(tenant, digests)
        if key is None:
            return None
        ids = {load.name: load.instance or load.name for load in loads}
        return lambda name: score(key, ids[name])

    def _home(
        self,
        named: tuple[str, str] | None,
        tenant: str,
        digests: Sequence[BlockHash],
        matches: Mapping[str, int],
        now: float,
    ) -> str | None:
        entry = self._last_turn(named, tenant, digests, matches, now)
        self._reuse.turn(None if entry is None else now - entry[1])
        return None if entry is None else entry[0]

    def _last_turn(
        self,
        named: tuple[str, str] | None,
        tenant: str,
        digests: Sequence[BlockHash],
        matches: Mapping[str, int],
        now: float,
    ) -> tuple[str, float] | None:
        if named is not None:
            return self._homes.entry(named, now)
        deepest = max(matches.values(), default=0)
        digest_at = reader(digests)
        for position in range(deepest - 1, max(deepest - _MAX_GENERATED_BLOCKS, 0) - 1, -1):
            key = (tenant, digest_at(position))
            if key in self._homes and (entry := self._homes.entry(key, now)) is not None:
                return entry
        return None


def _transfer(hits: Hits, k: Coefficients, matched: int, block_size: int) -> float:
    """Seconds to bring hits to the device. What is sooner computed than loaded is computed."""
    below = min(block_size * (hits.host + hits.disk + hits.remote), matched)
    loaded = block_size * (hits.host * k.host + hits.disk * k.disk + hits.remote * k.remote)
    return min(loaded, k.work(below, matched - below))
