"""Metrics of the tiers below the workers' devices, as the workers last reported them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.workers.tiers import OffloadView, TierView
from gateway.workers.views import WorkerView
from prefix_cache.events import DEVICE, HOST

PREFIX = "turnkeep_gateway_worker_tier_"

_GAUGES = (
    ("blocks", "Blocks that a tier holds, for all who share it"),
    ("used_bytes", "What they take"),
    ("max_bytes", "What they may take"),
    ("users", "Workers of one machine that share it"),
    ("seconds_per_block", "What loading a block takes the worker, measured"),
)
_COUNTERS = (
    ("hit_tokens", "Prompt tokens whose KV the worker loaded from the tier"),
    ("stored_blocks", "Blocks stored, by all who share the tier"),
    ("evicted_blocks", "Blocks given up for others, by all who share the tier"),
    ("healed_blocks", "Damaged blocks found and thrown away, by all who share the tier"),
    ("errors", "Errors of the system that the worker met there"),
)


def tier_families(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """Families whose samples are those of workers that report tiers, and of no others."""
    reporting = [(view.name, view.offload) for view in views if view.offload is not None]
    tiers = [((name, tier.name), tier) for name, offload in reporting for tier in offload.tiers]
    for name, text in _GAUGES:
        yield _filled(GaugeMetricFamily(PREFIX + name, text, labels=("worker", "tier")), tiers, name)
    for name, text in _COUNTERS:
        yield _filled(CounterMetricFamily(PREFIX + name, text, labels=("worker", "tier")), tiers, name)
    brought = CounterMetricFamily(
        PREFIX + "prefetched_blocks",
        "Blocks brought up into a tier before anybody asked for them",
        labels=("worker", "tier"),
    )
    useless = CounterMetricFamily(
        PREFIX + "useless_prefetches", "Those of them that nobody asked for while they were there", labels=("worker", "tier")
    )
    lost = CounterMetricFamily(
        "turnkeep_gateway_worker_lost_blocks",
        "Blocks that a session came back for, that had been given up everywhere and were computed again",
        labels=("worker",),
    )
    for worker, offload in reporting:
        _brought(brought, useless, worker, offload)
        lost.add_metric((worker,), offload.lost_blocks)
    yield from (brought, useless, lost)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, tiers: Sequence[tuple[tuple[str, str], TierView]], name: str
) -> Metric:
    for labels, tier in tiers:
        family.add_metric(labels, getattr(tier, name))
    return family


def _brought(brought: CounterMetricFamily, useless: CounterMetricFamily, worker: str, offload: OffloadView) -> None:
    brought.add_metric((worker, HOST), offload.prefetched_blocks)
    brought.add_metric((worker, DEVICE), offload.fetched_blocks)
    useless.add_metric((worker, HOST), offload.useless_prefetches)
    useless.add_metric((worker, DEVICE), offload.useless_fetches)
