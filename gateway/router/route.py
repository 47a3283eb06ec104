"""A choice that was made, from the moment it is booked until its turn has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.router.estimator import Observation
from gateway.router.receipts import Decision, Result
from gateway.router.standing import Standing
from gateway.turn import Receipt
from prefix_cache.hashing import BlockHash
from prefix_cache.index import Hits, Prediction

if TYPE_CHECKING:
    from gateway.router.router import HomeKey, Router


class Route:
    """Every route must end by `finished`, `failed` or `abandoned`; the first counts, later ones do nothing. `started` and
    `computed` come before, in this order, each at most once."""

    __slots__ = (
        "_beside",
        "_block_size",
        "_cached",
        "_decoding",
        "_digests",
        "_ended",
        "_hits",
        "_key",
        "_placed_at",
        "_prediction",
        "_promised",
        "_router",
        "_shared",
        "_was_idle",
        "decision",
        "prompt_tokens",
        "receipt",
        "seconds",
        "standing",
        "tokens",
    )

    def __init__(
        self,
        router: Router,
        standing: Standing,
        receipt: Receipt,
        decision: Decision,
        *,
        digests: Sequence[BlockHash],
        block_size: int,
        prompt_tokens: int,
        hits: Hits | None,
        promised: int,
        prediction: Prediction | None,
        key: HomeKey | None,
        decoding: int,
        now: float,
    ) -> None:
        self._router = router
        self.standing = standing
        self.receipt = receipt
        self.decision = decision
        self.prompt_tokens = prompt_tokens
        self._digests = digests
        self._block_size = block_size
        self._hits = hits
        self._promised = promised
        self._prediction = prediction
        self._key = key
        self._decoding = decoding
        self._placed_at = now
        self._cached: int | None = None
        self._beside = 0
        self._ended = False
        self.tokens = max(prompt_tokens - receipt.matched_tokens, 0)
        self.seconds = standing.coefficients.work(self.tokens, receipt.matched_tokens)
        self._was_idle = not standing.pending
        matched = receipt.matched_tokens // block_size
        self._shared = (digests[matched - 1] if matched else None, matched * block_size)
        standing.enqueue(self, now)
        standing.occupancy.enter(*self._shared, self._own)

    @property
    def _own(self) -> int:
        return max(self.prompt_tokens - self._shared[1], 0)

    def started(self, cached_tokens: int, queue_seconds: float | None = None) -> None:
        """It has left the worker's queue, which says how much of the prompt it need not compute."""
        if self._ended or self._cached is not None:
            return
        self._cached = cached = max(0, min(cached_tokens, self.prompt_tokens))
        outcome = self.decision.outcome
        outcome.result, outcome.cached_tokens, outcome.queue_seconds = "running", cached, queue_seconds
        new = self.prompt_tokens - cached
        self.standing.correct(self, self.standing.coefficients.work(new, cached), new)
        self._beside = self.standing.beside(self)
        self._router.compare(self, self._promised, cached, self._digests, self._block_size)

    def computed(self, cached_tokens: int | None) -> None:
        """The first token has come: its KV is there, events will say so. None: the worker does not say what it had cached."""
        if self._ended or self.decision.outcome.time_to_first_token is not None:
            return
        if cached_tokens is not None:
            self.started(cached_tokens)
        else:
            cached_tokens = self.receipt.matched_tokens
        now = self._router.now()
        self.decision.outcome.time_to_first_token = now - self._placed_at
        self.standing.dequeue(self, now)
        new = max(self.prompt_tokens - cached_tokens, 0)
        self.standing.worked(self.standing.coefficients.work(new, cached_tokens), new, now)
        self._router.computed(self._prediction)

    def finished(self, prefill_seconds: float = 0.0, decode_seconds: float = 0.0) -> None:
        """The turn has ended. What the worker says it took teaches the estimates; 0: it does not say."""
        if self._ended:
            return
        outcome = self.decision.outcome
        first_token = outcome.time_to_first_token
        learns = first_token is not None and self._router.learns(self.standing)
        apart = learns and first_token is not None and self.standing.apart(self._placed_at, self._placed_at + first_token)
        if prefill_seconds > 0:
            outcome.prefill_seconds = prefill_seconds
            if learns and first_token is not None and outcome.queue_seconds is not None:
                self._router.delayed(self.standing, first_token - prefill_seconds - outcome.queue_seconds, apart)
        elif first_token is not None and self._was_idle:
            # Nothing stood before it, so what the gateway saw is what it took.
            prefill_seconds = first_token
        if prefill_seconds > 0 and self._cached is not None and first_token is not None:
            self.standing.served(decode_seconds)
            if learns:
                self._router.observed(self.standing, self._observation(self._cached, prefill_seconds), apart)
        self._end("finished")

    def abandoned(self) -> None:
        """Its client has gone. What is not computed yet will not be, and nothing is expected any more."""
        self._end("abandoned")

    def failed(self) -> None:
        """The worker failed it: nothing is expected any more, and the session does not live there."""
        if not self._ended and self._key is not None:
            self._router.homeless(self._key)
        self._end("failed")

    def _end(self, result: Result) -> None:
        if self._ended:
            return
        self._ended = True
        self.standing.dequeue(self, self._router.now())
        self.standing.occupancy.leave(*self._shared, self._own)
        outcome = self.decision.outcome
        if outcome.time_to_first_token is None and self._prediction is not None:
            self._router.index.retract(self._prediction)
        self._digests = ()
        self._router.ended(self.decision, result)

    def _observation(self, cached: int, seconds: float) -> Observation:
        host = disk = remote = 0
        if self._hits is not None:
            # Of what was found, what lay in lower tiers is the end of it.
            found = cached // self._block_size - self._hits.device
            host = max(0, min(found, self._hits.host))
            disk = max(0, min(found - host, self._hits.disk))
            remote = max(0, min(found - host - disk, self._hits.remote))
        size = self._block_size
        return Observation(
            new=max(self.prompt_tokens - cached, 0),
            context=cached,
            decoding=self._decoding,
            seconds=seconds,
            host=host * size,
            disk=disk * size,
            remote=remote * size,
            beside=self._beside,
        )
