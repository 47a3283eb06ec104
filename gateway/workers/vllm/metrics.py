"""What vLLM's Prometheus text says about its load, its cache, and which life of the process this is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.workers.prometheus import Scanner

_SCANNER = Scanner(
    (
        "process_start_time_seconds",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:num_preemptions_created",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
    )
)
_CACHE_INFO = b"\nvllm:cache_config_info{"
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """Gauges are sums over the engines of one server, `cache_usage` (0 to 1) their mean. `life` differs after a restart;
    "" where the server does not tell. `block_size`, `num_blocks`: None where it does not say."""

    running: int
    waiting: int
    cache_usage: float
    life: str
    block_size: int | None
    num_blocks: int | None
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0


def parse_metrics(text: bytes) -> VllmMetrics | None:
    """None for a text that has none of vLLM's load gauges."""
    values = _SCANNER.scan(text)
    running, waiting = values.get("vllm:num_requests_running"), values.get("vllm:num_requests_waiting")
    if running is None or waiting is None:
        return None
    usage = values.get("vllm:kv_cache_usage_perc") or values.get("vllm:gpu_cache_usage_perc") or [0.0]
    born = values.get("process_start_time_seconds") or values.get("vllm:num_preemptions_created")
    block_size, num_blocks = _cache_config(text)

    def total(name: str) -> int:
        return int(sum(values.get(f"vllm:{name}", ())))

    return VllmMetrics(
        running=max(int(sum(running)), 0),
        waiting=max(int(sum(waiting)), 0),
        cache_usage=min(max(sum(usage) / len(usage), 0.0), 1.0),
        life=f"{born[0]:.3f}" if born else "",
        block_size=block_size,
        num_blocks=num_blocks,
        preemptions=total("num_preemptions_total"),
        prompt_tokens=total("prompt_tokens_total"),
        cached_tokens=total("prefix_cache_hits_total"),
        generated_tokens=total("generation_tokens_total"),
        requests=total("request_success_total"),
    )


def _cache_config(text: bytes) -> tuple[int | None, int | None]:
    """Block size, and blocks of all engines together."""
    block_size, blocks = None, 0
    for piece in (b"\n" + text).split(_CACHE_INFO)[1:]:
        labels = piece.partition(b"\n")[0]
        found = dict(_LABEL.findall(labels))
        size, count = found.get(b"block_size", b""), found.get(b"num_gpu_blocks", b"")
        if size.isdigit() and int(size):
            block_size = int(size)
        if count.isdigit():
            blocks += int(count)
    return block_size, blocks or None
