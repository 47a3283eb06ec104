"""The requests that an engine has, from the queue to their end: what a new token means for its request, and what goes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.config import EngineConfig
from engine.core import RequestRefused
from engine.kv_cache import KVCache
from engine.meter import Meter
from engine.output import StepOutput
from engine.request import ForbiddenTokenError, Request, Sequence
from engine.sampling.sampler import SampledToken
from engine.scheduler import Scheduler
from engine.session_blocks import SessionBlocks
from engine.session_scheduling import SessionScheduling

logger = logging.getLogger(__name__)


class InFlight:
    """Belongs to the engine thread. Whatever ends a request ends it here, so that its blocks come back on every way."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        cache: KVCache,
        sessions: SessionBlocks,
        meter: Meter,
        clock: Callable[[], float],
        ordering: SessionScheduling | None = None,
    ) -> None:
        self.arrivals = 0
        """Requests that were ever added."""
        self._config = config
        self._scheduler = scheduler
        self._cache = cache
        self._sessions = sessions
        self._meter = meter
        self._clock = clock
        self._ordering = ordering
        self._requests: dict[str, Request] = {}
        self._over: list[Request] = []  # resumed with nothing left to generate: the next step says so

    @property
    def has_over(self) -> bool:
        """True while there are requests that the next step ends without computing anything."""
        return bool(self._over)

    def add(self, prepared: Request) -> None:
        """Queues a prepared request. Raises RequestRefused when its id is in use."""
        if prepared.request_id in self._requests:
            raise RequestRefused(
                "duplicate_request_id",
                f"A request with the id {prepared.request_id!r} is in flight; give every request an id of its own.",
                "request_id",
            )
        prepared.added_at = self._clock()
        prepared.arrival = self.arrivals
        born = prepared.arrival
        if self._config.policy == "sessions":
            born = self._sessions.seniority(prepared.session, prepared.arrival, self._config.overtakes)
            # As long as all have room, who comes first goes first: the order of birth would only make the young ones wait.
            prepared.seniority = born if self._ordering is None or self._ordering.is_crowded else prepared.arrival
        self.arrivals += 1
        self._requests[prepared.request_id] = prepared
        self._meter.totals.requests += 1
        if self._ordering is not None and not self._ordering.arrives(prepared, born):
            return
        if not prepared.forked:
            self._scheduler.enqueue(prepared.sequences[0])
        elif prepared.held:
            self._scheduler.enqueue(prepared.held.pop(0))
        else:
            self._over.append(prepared)

    def abort(self, request_id: str) -> bool:
        """Drops a request at once and gives its blocks back. False when it is not known."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._drop(request)
        self._meter.totals.aborted += 1
        return True

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """The next `tokens` known tokens of a sequence have their KV. Choices that waited for the prompt's are queued."""
        self._cache.advance(sequence, tokens)
        request = sequence.request
        if request.held and sequence.computed >= request.prompt_tokens:
            for held in request.held:
                self._scheduler.enqueue(held)
            request.held.clear()

    def fork(self, sequence: Sequence) -> None:
        """Starts a choice from what choice 0 computed."""
        request = sequence.request
        request.forked = True
        self._cache.fork(request.sequences[0], sequence)
        self._scheduler.adopt(sequence)

    def append(self, sequence: Sequence, sampled: SampledToken, output: StepOutput, *, computed: bool = False) -> None:
        """Takes in a token that was chosen, and ends what it ends. `computed`: it was guessed, and the step that has just run
        has computed it."""
        request = sequence.request
        if sampled.error is not None:
            self.fail(request, "sampling_error", sampled.error, output)
            return
        try:
            decision = sequence.append(sampled.token_id)
        except ForbiddenTokenError:
            message = f"The grammar does not allow token {sampled.token_id}, which was sampled; this is a bug."
            self.fail(request, "grammar_error", message, output)
            return
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self.fail(request, "engine_error", f"The request failed: {error or type(error).__name__}", output)
            return
        self._meter.totals.generated_tokens += 1
        if computed:
            self._cache.advance(sequence, 1)
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        output.token(request, sequence.index, sampled)
        if decision is None:
            return
        self._scheduler.finish(sequence)
        output.finished(request, sequence.index, decision)
        if request.finished:
            del self._requests[request.request_id]
            if self._config.prefix_caching:
                self._sessions.ended(request.session, request.root, request.sequences[0].digests)
            if self._ordering is not None:
                self._ordering.ended(request, request.sequences[0])
            output.done(request, self._clock())

    def end_over(self, output: StepOutput) -> None:
        """Ends requests that were resumed when all of their choices had come to an end."""
        over, self._over = self._over, []
        for request in over:
            if self._requests.get(request.request_id) is not request:
                continue  # aborted meanwhile
            del self._requests[request.request_id]
            now = request.started_at = self._clock()
            output.started(request)
            for sequence, decision in request.ended:
                output.finished(request, sequence.index, decision)
            output.done(request, now)

    def fail(self, request: Request, code: str, message: str, output: StepOutput) -> None:
        """Ends a request that cannot go on; the others do not notice."""
        if request.request_id in self._requests:
            self._drop(request)
            output.failed(request, code, message)

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            self._scheduler.finish(sequence)
        if self._ordering is not None:
            self._ordering.ended(request, None)
