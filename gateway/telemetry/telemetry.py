"""One object that the API layer tells about turns; it keeps the metrics and, when asked, the spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from gateway.router.standing import Standing
from gateway.telemetry.config import TelemetryConfig
from gateway.telemetry.context import trace_context
from gateway.telemetry.failures import classify
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.names import route_outcome, turn_attributes
from gateway.telemetry.routing import StandingsCollector
from gateway.telemetry.stages import StageTimes
from gateway.turn import Migration, Receipt, Turn
from gateway.workers.views import WorkerView
from prefix_cache.hashing import DIGEST_BYTES
from prefix_cache.index import ResidencyIndex
from sessions.continuation import Continuation
from sessions.explain.misses import Miss
from sessions.shared import SharedSessions
from sessions.store import StoreStats

if TYPE_CHECKING:
    from gateway.admission.controller import Admission
    from gateway.admission.limits import RateLimits
    from gateway.server import HttpServer
    from gateway.telemetry.spans import OpenSpan, Tracing

Operation = Literal["chat", "text_completion", "embeddings"]


class TurnSpan:
    """One turn from its arrival to its end. The first of `finished` and `failed` ends it; later calls do nothing."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        operation: Operation,
        turn: Turn,
        carrier: dict[str, str],
        span: OpenSpan | None,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._counts = metrics.of_turns(operation, turn.model)
        self._carrier = carrier
        self._span = span
        self._clock = clock
        self._began = clock()
        self._first_token: float | None = None
        self._matched_tokens = 0
        self._receipts: list[Receipt] = []
        self._ended = False
        metrics.in_flight.value += 1

    def trace_headers(self) -> dict[str, str]:
        """W3C headers to send to the worker: this span as parent, or the caller's context when spans are off."""
        return dict(self._carrier) if self._span is None else self._span.headers()

    def dispatched(self, receipt: Receipt, *, counted: bool = True) -> None:
        """A prompt of the turn was accepted by a worker. `counted` False: for another request, which this one reads along."""
        if counted:
            self._metrics.routes.labels(receipt.reason).inc()
        self._matched_tokens += receipt.matched_tokens
        if self._span is not None and not self._ended:
            placed: dict[str, str | int | float] = {
                "turnkeep.replica": receipt.worker,
                "turnkeep.route.reason": receipt.reason,
                "turnkeep.route.matched_tokens": receipt.matched_tokens,
                "turnkeep.route.candidates": receipt.candidates,
                "turnkeep.route.estimated_seconds": receipt.seconds,
            }
            self._receipts.append(receipt)
            self._span.set(placed)
            self._span.event("turnkeep.dispatched", placed)

    def admitted(self, priority: str, waited: float) -> None:
        """It may go to its worker, after so many seconds in the queue of its class."""
        self._metrics.admission_wait.labels(priority).observe(waited)
        if self._span is not None and not self._ended:
            self._span.set({"turnkeep.admission.priority": priority, "turnkeep.admission.wait": waited})

    def attached(self, how: str, first: str) -> None:
        """The request reads along with a turn that request `first` began: still `running`, or `finished` and kept."""
        self._metrics.attached.labels(how).inc()
        if self._span is not None:
            self._span.set({"turnkeep.turn.attached": how, "turnkeep.turn.first_request": first})

    def migrated(self, migration: Migration) -> None:
        """The turn's generation went on on another worker. `Telemetry.stream_resumed` counts it."""
        if self._span is not None and not self._ended:
            self._span.set({"turnkeep.replica": migration.worker})
            self._span.event(
                "turnkeep.resumed",
                {
                    "turnkeep.resumed.lost": migration.lost,
                    "turnkeep.replica": migration.worker,
                    "turnkeep.resumed.tokens": migration.tokens,
                    "turnkeep.resumed.seconds": migration.seconds,
                    "turnkeep.resumed.why": migration.why,
                },
                at=migration.at,
            )

    def missed(self, miss: Miss) -> None:
        """The turn reused less than its predecessor left. `Telemetry.missed` counts it."""
        if self._span is not None and not self._ended:
            known: dict[str, str | int | float] = {
                "turnkeep.miss.cause": miss.cause,
                "turnkeep.miss.lost_tokens": miss.lost_tokens,
                "turnkeep.miss.shared_tokens": miss.tokens,
            }
            if miss.path:
                known |= {
                    "turnkeep.miss.path": miss.path,
                    "turnkeep.miss.field_bytes": miss.field_bytes,
                    "turnkeep.miss.text_bytes": miss.text_bytes,
                }
            if miss.lost_seconds is not None:
                known["turnkeep.miss.lost_seconds"] = miss.lost_seconds
            self._span.set(known)

    def first_token(self) -> None:
        """The first token has come; later calls do nothing."""
        if self._first_token is None and not self._ended:
            self._first_token = self._clock()
            seconds = self._first_token - self._began
            self._counts.first_token.observe(seconds)
            if self._span is not None:
                self._span.set({"gen_ai.response.time_to_first_chunk": seconds})
                self._span.event("gen_ai.first_token", {})

    def finished(
        self,
        *,
        response_id: str,
        response_model: str,
        finish_reasons: Sequence[str],
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        counted: bool = True,
    ) -> None:
        """The turn was answered. Tokens are summed over its prompts and choices; `counted` False: for another request."""
        if self._ended:
            return
        counts = self._counts
        if counted:
            counts.prompt_tokens.value += prompt_tokens
            counts.cached_tokens.value += cached_tokens
            counts.promised_tokens.value += self._matched_tokens
            counts.completion_tokens.value += completion_tokens
        if self._first_token is not None and completion_tokens > 1:
            seconds = (self._clock() - self._first_token) / (completion_tokens - 1)
            counts.per_token.observe(seconds)
        if self._span is not None:
            self._span.set(
                {
                    "gen_ai.response.id": response_id,
                    "gen_ai.response.model": response_model,
                    "gen_ai.response.finish_reasons": list(finish_reasons),
                    "gen_ai.usage.input_tokens": prompt_tokens,
                    "gen_ai.usage.output_tokens": completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": cached_tokens,
                }
            )
        self._end(200, None)

    def failed(self, error: BaseException) -> None:
        """The turn ended without an answer: a TurnError (its status and code are recorded), a disconnect
        (asyncio.CancelledError: status 499), or an unforeseen error (500)."""
        if self._ended:
            return
        status, kind = classify(error)
        if self._span is not None:
            self._span.set({"error.type": kind, "http.response.status_code": status})
        self._end(status, f"{kind}: {error}" if status >= 500 else None)

    def _end(self, status: int, failure: str | None) -> None:
        self._ended = True
        if self._span is not None:
            self._span.set(route_outcome(self._receipts))
        self._metrics.in_flight.value -= 1
        if status == 200:
            self._counts.answered.value += 1
        else:
            self._counts.failed(status)
        self._counts.duration.observe(self._clock() - self._began)
        if self._span is not None:
            self._span.end(failure)


class Telemetry:
    """Spans and metrics of one gateway process."""

    METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, config: TelemetryConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config if config is not None else TelemetryConfig()
        self._clock = clock
        self.metrics = GatewayMetrics()
        self._tracing: Tracing | None = None
        if self._config.otlp_url is not None:
            # Costs a third of a second and ten megabytes, which nobody without a collector should pay.
            from gateway.telemetry.spans import Tracing

            spans = self.metrics.spans
            self._tracing = Tracing(self._config, lambda result, count: spans.labels(result).inc(count))

    @property
    def stages(self) -> StageTimes:
        """Where the stages of a turn count their processor time."""
        return self.metrics.stages

    def start_turn(self, operation: Operation, turn: Turn, headers: Mapping[str, str]) -> TurnSpan:
        """`headers`: of the client's request; traceparent and tracestate are honoured."""
        carrier = trace_context(headers)
        span = None
        if self._tracing is not None:
            span = self._tracing.start(f"{operation} {turn.model}", carrier, turn_attributes(operation, turn))
        return TurnSpan(self.metrics, operation, turn, carrier, span, self._clock)

    def watch_router(self, standings: Callable[[], Mapping[str, Standing]], index: ResidencyIndex) -> None:
        """Where the metrics find what the router knows of the workers. Call once."""
        self.metrics.registry.register(StandingsCollector(standings, index))

    def watch_pool(self, workers: Callable[[], Sequence[WorkerView]]) -> None:
        """Where the metrics find the workers. Call once."""
        self.metrics.watch_pool(workers)

    def watch_admission(self, admission: Admission, limits: RateLimits) -> None:
        """Where the metrics find what waits and what was turned away. Call once."""
        self.metrics.watch_admission(admission, limits)

    def watch_connections(self, server: HttpServer) -> None:
        """Where the metrics find the connections. Call once."""
        self.metrics.watch_connections(server)

    def watch_sessions(self, stats: Callable[[], StoreStats]) -> None:
        """Where the metrics find the sessions' store. Call once."""
        self.metrics.watch_sessions(stats)

    def watch_shared_sessions(self, shared: SharedSessions) -> None:
        """Where the metrics find how it goes with Redis. Call once."""
        self.metrics.watch_shared_sessions(shared)

    def continued(self, made: Continuation) -> None:
        """A prompt was made from a session's ledger."""
        metrics = self.metrics
        metrics.histories.labels(made.path).inc()
        for reason in made.fallbacks:
            metrics.history_fallbacks.labels(reason).inc()
        spliced = made.spliced_tokens
        for source, count in (
            ("reused", made.reused_tokens - spliced),
            ("spliced", spliced),
            ("tokenised", made.tokenised_tokens),
        ):
            metrics.history_tokens.labels(source).inc(count)
        if made.orphaned:
            metrics.superseded_blocks.inc(len(made.orphaned) // DIGEST_BYTES)

    def missed(self, miss: Miss) -> None:
        """A turn reused less than its predecessor left."""
        self.metrics.misses.labels(miss.cause).inc()
        self.metrics.missed_tokens.labels(miss.cause).inc(miss.lost_tokens)

    def worker_failed(self, worker: str) -> None:
        """A worker failed a request before its first chunk."""
        self.metrics.worker_failures.labels(self.metrics.worker_label(worker)).inc()

    def stream_resumed(self, migration: Migration) -> None:
        """A generation lost its worker, and another went on."""
        self.metrics.streams_resumed.labels(self.metrics.worker_label(migration.lost)).inc()
        self.metrics.resume_seconds.observe(migration.seconds)

    def stream_lost(self, worker: str) -> None:
        """A generation ended because its worker was lost, or failed it."""
        self.metrics.streams_lost.labels(self.metrics.worker_label(worker)).inc()

    def turn_attached(self, result: str) -> None:
        """A retry could not attach to its turn (`refused`); `TurnSpan.attached` counts those that did."""
        self.metrics.attached.labels(result).inc()

    def keyword_unenforced(self, keyword: str) -> None:
        """A turn's grammar does not hold a keyword of its schemas."""
        self.metrics.unenforced.labels(keyword).inc()

    def arguments_checked(self, result: str) -> None:
        """Finished arguments, or an answer, were checked against their schema: valid, invalid or unknown."""
        self.metrics.checks.labels(result).inc()

    def generated_again(self, result: str) -> None:
        """A call that violated its schema was generated once more: valid, invalid, failed or impossible."""
        self.metrics.second_tries.labels(result).inc()

    def render_metrics(self) -> bytes:
        """What /metrics answers, as METRICS_CONTENT_TYPE."""
        return self.metrics.render()

    async def aclose(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        if self._tracing is not None:
            await self._tracing.aclose()
