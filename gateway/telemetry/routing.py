"""Metrics of routing: how good estimates and choices were, what the shadow would have done, how far workers are trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.router.receipts import Decision
from gateway.router.standing import Standing
from gateway.telemetry.tallies import CounterFamily, HistogramFamily
from prefix_cache.index import ResidencyIndex

_REGRET_BUCKETS = (0.0, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PREFIX = "turnkeep_gateway_"


class RouteMetrics:
    """A `gateway.router.receipts.RouteObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> CounterFamily:
            return CounterFamily(_PREFIX + name, text, labels, registry)

        self.outcomes = counter("route_outcomes", "Requests sent to a worker, by how that ended", "result")
        self.estimated = counter("route_estimated_seconds", "Time to the first token as the router expected it").labels()
        self.observed = counter("route_observed_seconds", "The same as it was, of the same requests").labels()
        self.error = counter("route_estimate_error_seconds", "By how much they differed, without sign").labels()
        self.regret = HistogramFamily(
            _PREFIX + "route_regret_seconds",
            "Time to the first token beyond the best estimate for another worker; 0 where none would have been sooner",
            (),
            registry,
            buckets=_REGRET_BUCKETS,
        ).labels()
        self.shadowed = counter("route_shadow", "Decisions by whether the shadow policy agreed", "policy", "agrees")
        self.shadow_seconds = counter(
            "route_shadow_seconds",
            "Estimated time to the first token of what the live policy and of what the shadow policy chose",
            "policy",
            "role",
        )

    def decided(self, decision: Decision) -> None:
        shadow = decision.shadow
        if shadow is not None:
            self.shadowed.labels(shadow.policy, str(shadow.worker == decision.worker).lower()).inc()
            self.shadow_seconds.labels(decision.policy, "live").inc(decision.seconds)
            self.shadow_seconds.labels(shadow.policy, "shadow").inc(shadow.seconds)

    def concluded(self, decision: Decision) -> None:
        outcome = decision.outcome
        self.outcomes.labels(outcome.result).inc()
        seen, estimated = outcome.time_to_first_token, decision.seconds
        if seen is not None:
            self.estimated.inc(estimated)
            self.observed.inc(seen)
            self.error.inc(abs(seen - estimated))
        if outcome.regret is not None:
            self.regret.observe(outcome.regret)


class StandingsCollector(Collector):
    """What the router knows of each worker, looked up when somebody scrapes."""

    def __init__(self, standings: Callable[[], Mapping[str, Standing]], index: ResidencyIndex) -> None:
        self._standings = standings
        self._index = index

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask a router that is still being built."""
        return ()

    def collect(self) -> Iterable[Metric]:
        standings = self._standings()
        trust = GaugeMetricFamily(
            _PREFIX + "worker_trust", "How its cache index is taken: 2 exact, 1 approximate, 0 not at all", labels=("worker",)
        )
        broken = GaugeMetricFamily(
            _PREFIX + "worker_broken_promises", "Running mean of promised tokens that were not cached", labels=("worker",)
        )
        changes = CounterMetricFamily(
            _PREFIX + "worker_trust_changes", "Steps down and up between the three", labels=("worker",)
        )
        token = GaugeMetricFamily(
            _PREFIX + "worker_prefill_seconds_per_token", "What a prompt token costs there, as estimated", labels=("worker",)
        )
        error = GaugeMetricFamily(
            _PREFIX + "worker_estimate_error", "Running mean of |observed - estimated| / estimated prefill", labels=("worker",)
        )
        for name, standing in standings.items():
            trust.add_metric((name,), 2 - standing.trust.level)
            broken.add_metric((name,), standing.trust.broken)
            changes.add_metric((name,), standing.trust.changes)
            token.add_metric((name,), standing.coefficients.token)
            error.add_metric((name,), standing.estimator.error)
        yield from (trust, broken, changes, token, error)
        yield GaugeMetricFamily(_PREFIX + "index_distinct_blocks", "Blocks in the residency index", value=len(self._index))
        yield CounterMetricFamily(
            _PREFIX + "index_evicted_blocks", "Blocks forgotten to stay within its bound", value=self._index.evicted
        )
