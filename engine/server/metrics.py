"""Prometheus metrics of a replica, on a registry of their own. Names begin with `turnkeep_engine_`.

Load and totals are read from the engine's stats when they are asked for; durations are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from engine.server.draft_metrics import draft_families
from engine.server.retention import WaitingTable
from engine.server.stream import RequestStream
from engine.server.vllm.metrics import VllmMetrics
from engine.thread import EngineThread
from gateway.workers.protocol import Chunk, Done, Failed, Started, TierStats, Tokens

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_PREFIX = "turnkeep_engine_"
# The buckets of the OpenTelemetry GenAI conventions for a request, the first token, and every other token.
_REQUEST = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics:
    """An observer of an `EngineThread`."""

    def __init__(self, engine: EngineThread, waiting: WaitingTable) -> None:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(_StatsCollector(engine, waiting))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{_PREFIX}{name}_seconds", text, buckets=buckets, registry=registry)

        self._registry = registry
        self._vllm = VllmMetrics(engine, registry)
        self._step = histogram("step", "One step of the engine.", _STEP)
        self._first_token = histogram("time_to_first_token", "From the arrival of a request to its first token.", _FIRST_TOKEN)
        self._token = histogram("inter_token_latency", "Between two tokens of a request, all its choices together.", _TOKEN)
        self._queue = histogram("queue", "From the arrival of a request to its first step.", _REQUEST)
        self._prefill = histogram("prefill", "From the first step of a request to its first token.", _REQUEST)
        self._decode = histogram("decode", "From the first token of a request to its last.", _REQUEST)
        self._duration = histogram("request_duration", "From the arrival of a request to its end.", _REQUEST)
        self._ended = Counter(f"{_PREFIX}requests_ended", "Requests by how they ended.", ["outcome"], registry=registry)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def step_ended(self, seconds: float) -> None:
        self._step.observe(seconds)

    def chunk_arrived(self, stream: RequestStream, chunk: Chunk, at: float) -> None:
        self._vllm.chunk_arrived(stream, chunk, at)
        if isinstance(chunk, Tokens):
            if stream.last_token_at is None:
                self._first_token.observe(at - stream.arrived)
            elif stream.last_token_at < at:
                # Several tokens of one step share the time since the step before; so do the choices.
                self._token.observe((at - stream.last_token_at) / len(chunk.token_ids))
        elif isinstance(chunk, Started):
            self._queue.observe(chunk.queue_seconds)
        elif isinstance(chunk, Done):
            self._prefill.observe(chunk.prefill_seconds)
            self._decode.observe(chunk.decode_seconds)

    def request_ended(self, stream: RequestStream, at: float) -> None:
        self._vllm.request_ended(stream, at)
        self._duration.observe(at - stream.arrived)
        self._ended.labels(outcome_of(stream)).inc()


def outcome_of(stream: RequestStream) -> str:
    """How a request ended: its finish reason (the first choice's), `failed`, or `disconnected` when its reader left."""
    if isinstance(stream.end, Failed):
        return "failed"
    if stream.end is None:
        return "disconnected"
    reasons = [finished.finish_reason for _, finished in sorted(stream.finished.items())]
    return reasons[0] if reasons else "abort"


class _StatsCollector(Collector):
    def __init__(self, engine: EngineThread, waiting: WaitingTable) -> None:
        self._engine = engine
        self._waiting = waiting

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats, info = self._engine.stats(), self._engine.info
        identity = {
            "model": info.model,
            "instance": info.instance,
            "namespace": info.namespace,
            "simulated": str(info.simulated),
        }
        yield InfoMetricFamily(f"{_PREFIX}replica", "What this replica is.", value=identity)
        if info.startup is not None:
            startup = GaugeMetricFamily(f"{_PREFIX}startup_seconds", "What the start took, by part.", labels=["part"])
            for part in ("load", "compile", "warm_up"):
                startup.add_metric([part], getattr(info.startup, part))
            yield startup
        blocks = GaugeMetricFamily(f"{_PREFIX}kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["free"], stats.free_blocks)
        blocks.add_metric(["cached"], stats.cached_blocks)
        blocks.add_metric(["referenced"], stats.num_blocks - stats.free_blocks - stats.cached_blocks)
        yield blocks
        for name, text, value in (
            ("requests_running", "Sequences in the running batch.", stats.running),
            ("requests_waiting", "Sequences that wait, requests being checked among them.", stats.waiting),
            ("waiting_prompt_tokens", "Prompt tokens of what waits.", stats.waiting_prompt_tokens),
            ("prefill_tokens_per_second", "Prefill rate of the last steps.", stats.prefill_tokens_per_second),
            ("decode_tokens_per_second", "Decode rate of the last steps.", stats.decode_tokens_per_second),
            ("event_subscribers", "Open KV event streams.", self._engine.events.subscribers),
            ("requests_loading", "Sequences whose blocks are on their way from a tier.", stats.loading),
            ("waiting_sessions", "Sessions between two turns, by the hints of gateways.", len(self._waiting)),
            ("requests_held", "Those that wait until sessions in progress leave room for theirs.", stats.held),
            ("held_prompt_tokens", "Prompt tokens of those.", stats.held_prompt_tokens),
            ("sessions_in_progress", "Sessions whose KV is kept for their next turns.", stats.sessions_in_progress),
            ("sessions_paused", "Sessions that wait for others to end.", stats.sessions_paused),
            ("event_log_bytes", "KV events kept for replay.", self._engine.events.tail_bytes),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value)
        if stats.tiers:
            yield from _tier_families(stats.tiers)
        yield from draft_families(stats)
        for name, text, value in (
            ("steps", "Steps of the engine.", stats.steps_total),
            ("requests", "Requests queued.", stats.requests_total),
            ("requests_aborted", "Requests aborted, by request or because their reader left.", stats.aborted_total),
            ("prompt_tokens", "Prompt tokens of started requests, cached ones among them.", stats.prompt_tokens_total),
            ("cached_tokens", "Prompt tokens whose KV was in the cache.", stats.cached_tokens_total),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens_total),
            ("drafted_tokens", "Tokens guessed and computed before they were known.", stats.drafted_tokens_total),
            ("accepted_tokens", "Those of them that were generated.", stats.accepted_tokens_total),
            ("forced_tokens", "Tokens that a grammar left no choice about.", stats.forced_tokens_total),
            ("mask_seconds", "What grammars took of the engine's thread.", stats.mask_seconds_total),
            ("decode_passes", "Sequences' parts in steps that decoded them.", stats.decode_passes_total),
            ("preemptions", "Sequences that gave their blocks back to be computed again.", stats.preemptions_total),
            ("retention_hints", "Hints of gateways when a session will be back.", self._waiting.hints),
            ("lost_blocks", "Blocks that a session came back for and that were computed again.", stats.lost_blocks_total),
            ("prefetched_blocks", "Blocks brought into memory before anybody asked.", stats.prefetched_blocks_total),
            ("useless_prefetches", "Those of them that nobody asked for in ten minutes.", stats.useless_prefetches_total),
            ("fetched_blocks", "Blocks brought onto the device before their session was back.", stats.fetched_blocks_total),
            ("useful_fetches", "Those of them that were there when it was.", stats.useful_fetches_total),
            ("useless_fetches", "Those of them that were not, or whose session did not come.", stats.useless_fetches_total),
            ("held_requests", "Requests that had to wait for sessions in progress.", stats.held_total),
            ("session_pauses", "Sessions that had to pause.", stats.pauses_total),
            ("kv_event_batches", "KV event batches published.", self._engine.events.seq),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value)


def _tier_families(tiers: tuple[TierStats, ...]) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """What the tiers below the device hold and have done, by tier."""
    for name, text, gauge in (
        ("blocks", "Blocks that a tier holds, for all who share it.", "blocks"),
        ("used_bytes", "What they take.", "used_bytes"),
        ("max_bytes", "What they may take.", "max_bytes"),
        ("seconds_per_block", "What loading a block takes, measured.", "seconds_per_block"),
    ):
        family = GaugeMetricFamily(f"{_PREFIX}tier_{name}", text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], getattr(tier, gauge))
        yield family
    for name, text, total in (
        ("hit_tokens", "Prompt tokens whose KV was loaded.", "hit_tokens_total"),
        ("stored_blocks", "Blocks stored, by all who share the tier.", "stored_blocks_total"),
        ("evicted_blocks", "Blocks given up for others.", "evicted_blocks_total"),
        ("healed_blocks", "Damaged blocks found and thrown away.", "healed_blocks_total"),
        ("errors", "Errors of the system.", "errors_total"),
    ):
        counter = CounterMetricFamily(f"{_PREFIX}tier_{name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.name], getattr(tier, total))
        yield counter
