"""A replica's metrics under the names that vLLM has for them, for routers, autoscalers and dashboards made for it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from engine.server.stream import RequestStream
from engine.thread import EngineThread
from gateway.workers.protocol import Chunk, Done, DrafterStats, Failed, Started, Tokens, WorkerStats

# The buckets that vLLM has.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_LABELS = ("model_name", "engine")
_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmMetrics:
    """An observer of an `EngineThread` that keeps vLLM's histograms; gauges and totals are read when somebody scrapes."""

    def __init__(self, engine: EngineThread, registry: CollectorRegistry) -> None:
        model = engine.info.model
        registry.register(_StatsCollector(engine))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, _LABELS, buckets=buckets, registry=registry).labels(model, "0")

        self._first_token = histogram("time_to_first_token", "Time to first token.", _FIRST_TOKEN)
        self._token = histogram("inter_token_latency", "Time between two tokens.", _TOKEN)
        self._request = histogram("e2e_request_latency", "From arrival to the end.", _REQUEST)
        self._queue = histogram("request_queue_time", "Time in the queue.", _REQUEST)
        self._prefill = histogram("request_prefill_time", "Time of prefill.", _REQUEST)
        self._decode = histogram("request_decode_time", "Time of decoding.", _REQUEST)
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by why.", (*_LABELS, "finished_reason"), registry=registry
        )
        self._model = model

    def step_ended(self, seconds: float) -> None:
        pass

    def chunk_arrived(self, stream: RequestStream, chunk: Chunk, at: float) -> None:
        match chunk:
            case Tokens():
                if stream.last_token_at is None:
                    self._first_token.observe(at - stream.arrived)
                elif stream.last_token_at < at:
                    self._token.observe((at - stream.last_token_at) / len(chunk.token_ids))
            case Started():
                self._queue.observe(chunk.queue_seconds)
            case Done():
                self._prefill.observe(chunk.prefill_seconds)
                self._decode.observe(chunk.decode_seconds)

    def request_ended(self, stream: RequestStream, at: float) -> None:
        self._request.observe(at - stream.arrived)
        if isinstance(stream.end, Failed):
            reason = "error"
        else:
            reasons = [finished.finish_reason for _, finished in sorted(stream.finished.items())]
            reason = _REASONS[reasons[0]] if stream.end is not None and reasons else "abort"
        self._success.labels(self._model, "0", reason).inc()


class _StatsCollector(Collector):
    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily]:
        stats, info = self._engine.stats(), self._engine.info
        used = 0.0
        if stats.num_blocks:
            used = 1 - (stats.free_blocks + stats.cached_blocks) / stats.num_blocks
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", float(stats.running)),
            ("num_requests_waiting", "Requests that wait.", float(stats.waiting)),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric((info.model, "0"), value)
            yield gauge
        for name, text, total in (
            ("num_preemptions", "Preemptions.", stats.preemptions_total),
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens_total),
            ("prefix_cache_queries", "Prompt tokens looked for in the cache.", stats.prompt_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.cached_tokens_total),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric((info.model, "0"), total)
            yield counter
        yield from speculation_families(stats, (info.model, "0"))
        config = {
            "engine": "0",
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": "True",
        }
        yield InfoMetricFamily("vllm:cache_config", "KV cache.", value=config)


def speculation_families(stats: WorkerStats, labels: tuple[str, str]) -> Iterable[CounterMetricFamily]:
    """Of what a replica has guessed since its start; `labels`: model and engine."""
    drafts = stats.drafts or DrafterStats(name="all")
    for name, text, total in (
        ("drafts", "Verified guesses.", drafts.drafts_total),
        ("draft_tokens", "Guessed tokens.", drafts.drafted_tokens_total),
        ("accepted_tokens", "Guessed tokens that came true.", drafts.accepted_tokens_total),
    ):
        counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=_LABELS)
        counter.add_metric(labels, total)
        yield counter
    positions = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that came true, by place.",
        labels=(*_LABELS, "position"),
    )
    for position, count in enumerate(drafts.accepted_per_position_total):
        positions.add_metric((*labels, str(position)), count)
    yield positions
