"""The gateway's Prometheus metrics. Labels are bounded: no session, tenant or request ever becomes one."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.routing import RouteMetrics
from gateway.telemetry.stages import StageTimes
from gateway.telemetry.tallies import CounterFamily, HistogramFamily, Level, Spread, Tally
from gateway.telemetry.tiers import tier_families
from gateway.workers.views import WorkerView
from sessions.shared import SharedSessions
from sessions.store import StoreStats

if TYPE_CHECKING:
    from gateway.admission.controller import Admission
    from gateway.admission.limits import RateLimits
    from gateway.server import HttpServer

# Buckets of gen_ai.server.request.duration, .time_to_first_token and .time_per_output_token, in seconds.
DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_MAX_MODELS = 64
_MAX_WORKERS = 1024
_STATES = ("starting", "ready", "down", "mismatched")


class TurnCounts:
    """What turns of one operation and model count in, each looked up once, when it is first needed: what never happened has no
    line in the exposition."""

    def __init__(self, metrics: GatewayMetrics, operation: str, model: str) -> None:
        """`model`: the label."""
        self._metrics = metrics
        self._both = (operation, model)
        self._model = model

    @cached_property
    def duration(self) -> Spread:
        return self._metrics.duration.labels(*self._both)

    @cached_property
    def first_token(self) -> Spread:
        return self._metrics.first_token.labels(*self._both)

    @cached_property
    def per_token(self) -> Spread:
        return self._metrics.per_token.labels(*self._both)

    @cached_property
    def answered(self) -> Tally:
        """Turns that ended with status 200."""
        return self._metrics.turns.labels(*self._both, "200")

    @cached_property
    def prompt_tokens(self) -> Tally:
        return self._metrics.prompt_tokens.labels(self._model)

    @cached_property
    def cached_tokens(self) -> Tally:
        return self._metrics.cached_tokens.labels(self._model)

    @cached_property
    def promised_tokens(self) -> Tally:
        return self._metrics.promised_tokens.labels(self._model)

    @cached_property
    def completion_tokens(self) -> Tally:
        return self._metrics.completion_tokens.labels(self._model)

    def failed(self, status: int) -> None:
        """A turn ended with this status."""
        self._metrics.turns.labels(*self._both, str(status)).inc()


class GatewayMetrics:
    """Counters and histograms of turns in a registry of their own; workers are looked at when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "turnkeep_gateway_"

        def histogram(name: str, text: str, buckets: Sequence[float]) -> HistogramFamily:
            return HistogramFamily(prefix + name, text, ("operation", "model"), self.registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> CounterFamily:
            return CounterFamily(prefix + name, text, labels, self.registry)

        self.duration = histogram("request_duration_seconds", "Turns from arrival to the last byte", DURATION_BUCKETS)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Turns from arrival to the first token", FIRST_TOKEN_BUCKETS
        )
        self.per_token = histogram(
            "time_per_output_token_seconds", "Time after the first token, divided by the tokens after it", PER_TOKEN_BUCKETS
        )
        self.turns = counter("turns", "Turns that ended, by HTTP status (499: the client left)", "operation", "model", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered turns, cached ones included", "model")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that a worker found in its cache", "model")
        self.promised_tokens = counter(
            "promised_tokens", "Prompt tokens that the index expected a worker to find in its cache", "model"
        )
        self.completion_tokens = counter("completion_tokens", "Generated tokens of answered turns", "model")
        self.routes = counter("routes", "Prompts placed on a worker, by what decided", "reason")
        self.unenforced = counter(
            "schema_keywords_unenforced",
            "Keywords that the grammar of a turn did not hold, and that were checked afterwards",
            "keyword",
        )
        self.checks = counter(
            "schema_checks", "Finished calls and answers that were checked against their schema, by how it came out", "result"
        )
        self.second_tries = counter(
            "second_tries",
            "Answers with a call that violated its schema that were generated once more, by how it came out "
            "(valid, invalid, failed, or impossible where no part could be left out)",
            "result",
        )
        self.worker_failures = counter(
            "worker_failures", "Requests that a worker failed before its first chunk; they were tried elsewhere", "worker"
        )
        self.streams_resumed = counter(
            "streams_resumed", "Generations that lost this worker after they had started and went on on another", "worker"
        )
        self.streams_lost = counter(
            "streams_lost", "Generations that ended with an error because this worker was lost or failed them", "worker"
        )
        self.resume_seconds = HistogramFamily(
            prefix + "resume_seconds",
            "Time from the loss of a worker until another had accepted what it left",
            (),
            self.registry,
            buckets=FIRST_TOKEN_BUCKETS,
        ).labels()
        self.misses = counter("misses", "Turns that reused less than their predecessors left, by cause", "cause")
        self.missed_tokens = counter("missed_tokens", "Tokens that such turns had computed again, by cause", "cause")
        self.attached = counter(
            "turns_attached",
            "Retries of a turn: attached to it while it ran, answered from what was kept, refused as too much was said",
            "result",
        )
        self.histories = counter(
            "histories", "Prompts by how they were made of their session's ledger: new, tail, whole, text", "path"
        )
        self.history_fallbacks = counter(
            "history_fallbacks", "What kept a prompt from being spliced or cut, by reason (docs/sessions.md)", "reason"
        )
        self.history_tokens = counter(
            "history_tokens", "Prompt tokens by where they come from: reused or spliced from a ledger, or tokenised", "source"
        )
        self.superseded_blocks = counter("superseded_blocks", "Blocks that a session's rewritten history left behind").labels()
        self.admission_wait = HistogramFamily(
            prefix + "admission_wait_seconds",
            "Time that turns waited for a worker with room",
            ("priority",),
            self.registry,
            buckets=WAIT_BUCKETS,
        )
        # The exporter counts on a thread of its own.
        self.spans = Counter(
            prefix + "spans", "Spans handed to the OTLP exporter, by result", ("result",), registry=self.registry
        )
        self.in_flight = Level(prefix + "turns_in_flight", "Turns that have arrived and not ended", self.registry)
        self.routing = RouteMetrics(self.registry)
        self.stages = StageTimes()
        self.registry.register(_StagesCollector(self.stages))
        self._models: set[str] = set()
        self._turns: dict[tuple[str, str], TurnCounts] = {}
        self._workers: set[str] = set()
        ProcessCollector(registry=self.registry)

    def model_label(self, model: str) -> str:
        """The label of a model; beyond a few dozen names they are all "other"."""
        return _bounded(self._models, model, _MAX_MODELS)

    def of_turns(self, operation: str, model: str) -> TurnCounts:
        """What turns of an operation and a model count in."""
        label = self.model_label(model)
        counts = self._turns.get((operation, label))
        if counts is None:
            counts = self._turns[operation, label] = TurnCounts(self, operation, label)
        return counts

    def worker_label(self, worker: str) -> str:
        """The same for worker names, which come and go with autoscaling."""
        return _bounded(self._workers, worker, _MAX_WORKERS)

    def watch_pool(self, workers: Callable[[], Sequence[WorkerView]]) -> None:
        """Where to find the workers when somebody scrapes. Call once."""
        self.registry.register(_PoolCollector(workers))

    def watch_sessions(self, stats: Callable[[], StoreStats]) -> None:
        """Where to find the sessions when somebody scrapes. Call once."""
        self.registry.register(_SessionsCollector(stats))

    def watch_admission(self, admission: Admission, limits: RateLimits) -> None:
        """Where to find what waits and what was turned away when somebody scrapes. Call once."""
        self.registry.register(_AdmissionCollector(admission, limits))

    def watch_connections(self, server: HttpServer) -> None:
        """Where to find the connections when somebody scrapes. Call once."""
        self.registry.register(_ConnectionsCollector(server))

    def watch_shared_sessions(self, shared: SharedSessions) -> None:
        """Where to find how it goes with Redis when somebody scrapes. Call once."""
        self.registry.register(_SharedCollector(shared))

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class _SharedCollector(Collector):
    def __init__(self, shared: SharedSessions) -> None:
        self._shared = shared

    def describe(self) -> Iterable[Metric]:
        """Nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        prefix, shared = "turnkeep_gateway_redis_", self._shared
        yield GaugeMetricFamily(prefix + "up", "1 while Redis is in use, 0 while it is gone", float(shared.up))
        yield GaugeMetricFamily(prefix + "unsaved_sessions", "Sessions whose last write waits for Redis", shared.unsaved)
        calls = CounterMetricFamily(prefix + "calls", "Calls to Redis by how they ended", labels=("operation", "result"))
        for (operation, result), count in sorted(shared.calls.items()):
            calls.add_metric((operation, result), count)
        yield calls
        events = CounterMetricFamily(prefix + "events", "What happened to entries in Redis", labels=("event",))
        for event, count in sorted(shared.events.items()):
            events.add_metric((event,), count)
        yield events


class _PoolCollector(Collector):
    def __init__(self, workers: Callable[[], Sequence[WorkerView]]) -> None:
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask a pool that is still being built."""
        return ()

    def collect(self) -> Iterable[Metric]:
        prefix = "turnkeep_gateway_"
        views = self._workers()
        states = GaugeMetricFamily(prefix + "workers", "Workers by state", labels=("state",))
        count = Count(view.state for view in views)
        for state in _STATES:
            states.add_metric((state,), count[state])
        yield states
        measures: tuple[tuple[str, str, Callable[[WorkerView], float | None]], ...] = (
            ("worker_up", "1 when the worker is ready", lambda view: float(view.state == "ready")),
            ("worker_in_flight", "Requests this gateway has in flight there", lambda view: view.in_flight),
            ("worker_queued_tokens", "Prompt tokens sent there and not yet computed", lambda view: view.queued_tokens),
            ("index_blocks", "Blocks the residency index knows of the worker", lambda view: view.indexed_blocks),
            ("events_lag_seconds", "Time since the worker's KV events were last heard of", lambda view: view.events_lag),
        )
        for name, text, measure in measures:
            family = GaugeMetricFamily(prefix + name, text, labels=("worker",))
            for view in views:
                value = measure(view)
                if value is not None:
                    family.add_metric((view.name,), value)
            yield family
        trouble = CounterMetricFamily(
            prefix + "kv_event_trouble", "KV events of workers that were lost or could not be used", labels=("worker", "what")
        )
        for view in views:
            for what, times in view.event_trouble.items():
                trouble.add_metric((view.name, what), times)
        yield trouble
        yield from tier_families(views)


class _AdmissionCollector(Collector):
    def __init__(self, admission: Admission, limits: RateLimits) -> None:
        self._admission = admission
        self._limits = limits

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        admission, prefix = self._admission, "turnkeep_gateway_admission_"
        queued = GaugeMetricFamily(prefix + "queued", "Turns that wait for a worker with room", labels=("priority",))
        for priority, depth in admission.depths().items():
            queued.add_metric((priority,), depth)
        yield queued
        yield GaugeMetricFamily(prefix + "queued_tokens", "Prompt tokens of those", value=admission.queued_tokens())
        yield GaugeMetricFamily(prefix + "in_flight", "Turns that were let in and have not ended", value=admission.in_flight)
        shed = CounterMetricFamily(
            prefix + "shed", "Turns that were turned away: births are first turns of sessions", labels=("reason", "kind")
        )
        for (reason, kind), count in sorted(admission.sheds.items()):
            shed.add_metric((reason, kind), count)
        yield shed
        limited = CounterMetricFamily(
            "turnkeep_gateway_rate_limited",
            "Requests over the limits of their key, by which",
            labels=("of",),
        )
        for what in ("requests", "tokens"):
            limited.add_metric((what,), self._limits.refused[what])
        yield limited


class _ConnectionsCollector(Collector):
    def __init__(self, server: HttpServer) -> None:
        self._server = server

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        connections, prefix = self._server.connections, "turnkeep_gateway_"
        if connections is None:
            return
        yield GaugeMetricFamily(prefix + "connections", "Connections that clients have open", value=len(connections))
        family = CounterMetricFamily(
            prefix + "connections_closed", "Connections that the gateway did not want, by why", labels=("reason",)
        )
        for reason in ("refused", "evicted", "slow"):
            family.add_metric((reason,), getattr(connections, reason))
        yield family


class _StagesCollector(Collector):
    def __init__(self, stages: StageTimes) -> None:
        self._stages = stages

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "turnkeep_gateway_stage_cpu_seconds", "Processor time of turns by stage, on whichever thread", labels=("stage",)
        )
        for stage, seconds in self._stages.seconds.items():
            family.add_metric((stage,), seconds)
        yield family


class _SessionsCollector(Collector):
    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats, prefix = self._stats(), "turnkeep_gateway_"
        yield GaugeMetricFamily(prefix + "sessions", "Sessions whose ledgers this process holds", value=stats.sessions)
        yield GaugeMetricFamily(prefix + "sessions_bytes", "What those ledgers take in memory", value=stats.bytes)
        yield CounterMetricFamily(
            prefix + "sessions_evicted", "Sessions dropped to stay within sessions.max_bytes", value=stats.evicted
        )


def _bounded(known: set[str], name: str, limit: int) -> str:
    if name in known:
        return name
    if len(known) >= limit:
        return "other"
    known.add(name)
    return name
