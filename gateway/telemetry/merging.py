"""The metrics of several processes as one: what they count is added up, what all of them look at is not counted twice."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.telemetry.tiers import PREFIX as _TIERS

log = logging.getLogger(__name__)

# What every process sees alike, the workers and Redis, is not counted twice.
_SMALLEST = frozenset(
    {
        "turnkeep_gateway_worker_up",
        "turnkeep_gateway_redis_up",
        "turnkeep_gateway_worker_trust",
    }
)
_LARGEST = frozenset(
    {
        "turnkeep_gateway_workers",
        "turnkeep_gateway_events_lag_seconds",
        "turnkeep_gateway_index_blocks",
        "turnkeep_gateway_index_distinct_blocks",
        "turnkeep_gateway_worker_broken_promises",
        "turnkeep_gateway_worker_estimate_error",
        "turnkeep_gateway_worker_prefill_seconds_per_token",
    }
)
# What workers say of themselves. Counters only grow, so of reports of different age the largest is the last.
_REPORTED = (_TIERS, "turnkeep_gateway_worker_lost_blocks")
_ONE_PROCESS = ("process_",)


def merged(texts: Sequence[bytes]) -> bytes:
    """One exposition of several. Counters, histograms and gauges are summed by their labels; of what every process sees alike
    the largest counts, or, of whether something is up or trusted, the smallest; what a process says of itself gets a label
    `process`."""
    families: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for number, text in enumerate(texts):
        try:
            found = list(text_string_to_metric_families(text.decode("utf-8", "replace")))
        except ValueError as error:
            log.warning("the metrics of a process cannot be read: %s", error)
            continue
        for family in found:
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            values = samples.setdefault(family.name, {})
            for sample in family.samples:
                labels = dict(sample.labels)
                if family.name.startswith(_ONE_PROCESS):
                    labels["process"] = str(number)
                key = (sample.name, tuple(sorted(labels.items())))
                before = values.get(key)
                values[key] = sample.value if before is None else _together(family.name, before, sample.value)
    for name, values in samples.items():
        for (sample_name, labels_of), value in values.items():
            families[name].add_sample(sample_name, dict(labels_of), value)
    registry = CollectorRegistry()
    registry.register(_Merged(families.values()))
    return generate_latest(registry)


def _together(name: str, one: float, other: float) -> float:
    if name.endswith("_created"):
        return min(one, other)
    if name.startswith(_REPORTED) or name in _LARGEST:
        return max(one, other)
    return min(one, other) if name in _SMALLEST else one + other


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families
