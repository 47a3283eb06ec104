"""Metrics of guessed tokens: how long guesses came true, and who guessed."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from gateway.workers.protocol import WorkerStats

_PREFIX = "turnkeep_engine_"


def draft_families(stats: WorkerStats) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
    """Of what a replica has guessed since its start; families without samples before the first guess."""
    length = HistogramMetricFamily(f"{_PREFIX}accepted_draft_length", "Tokens of a verified guess that came true.", labels=[])
    if stats.drafts is not None:
        # So many came true up to this token at least: the others end before it.
        drafts, reached = stats.drafts.drafts_total, stats.drafts.accepted_per_position_total
        buckets = [(f"{position}.0", drafts - count) for position, count in enumerate(reached)]
        length.add_metric([], [*buckets, ("+Inf", drafts)], sum_value=stats.drafts.accepted_tokens_total)
    yield length
    for name, text, total in (
        ("drafts", "Guesses that were verified.", "drafts_total"),
        ("drafted_tokens", "Tokens guessed.", "drafted_tokens_total"),
        ("accepted_tokens", "Those of them that came true.", "accepted_tokens_total"),
    ):
        counter = CounterMetricFamily(f"{_PREFIX}drafter_{name}", f"{text} By who guessed.", labels=["drafter"])
        for drafter in stats.drafters:
            counter.add_metric([drafter.name], getattr(drafter, total))
        yield counter
