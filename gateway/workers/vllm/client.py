"""A `Worker` for vLLM's OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.workers.base import ChunkStream, WorkerUnavailableError
from gateway.workers.foreign import foreign_namespace
from gateway.workers.foreign_client import ForeignClient, most_tokens, prompt_ids
from gateway.workers.protocol import PROTOCOL_VERSION, Capabilities, GenerateRequest, WorkerInfo, WorkerStats
from gateway.workers.vllm.metrics import VllmMetrics, parse_metrics
from gateway.workers.vllm.requests import completion_body
from gateway.workers.vllm.stream import CompletionStream

_DEFAULT_BLOCK_SIZE = 16


class VllmClient(ForeignClient):
    """vLLM at `spec.url`. Its adapters (LoRA) are served under their own names; its base model as `spec.model`, where given.

    A life of the process is told by its start time in /metrics. KV events need `spec.events`; without `spec.replay` only what
    is stored after the gateway subscribed is known.
    """

    what = "vLLM"
    _base_model = ""

    async def info(self) -> WorkerInfo:
        models = await self._cards()
        bases = [model for model in models if model.parent is None and model.max_model_len]
        if not bases:
            raise WorkerUnavailableError(f"worker {self.url} serves no model; is it vLLM?", reached=True)
        metrics = await self._metrics()
        base = bases[0]
        name = self._name_of(base.id)
        block_size = metrics.block_size or _DEFAULT_BLOCK_SIZE
        self._base_model = base.id
        self._info = WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            instance=_instance(metrics, base.id),
            model=name,
            namespace=foreign_namespace(name, block_size).hex(),
            block_size=block_size,
            num_blocks=metrics.num_blocks or 0,
            max_model_len=base.max_model_len or 0,
            vocab_size=0,
            max_concurrency=self._spec.concurrency,
            adapters=tuple(model.id for model in models if model is not base and model.id != name),
            capabilities=Capabilities(kv_events=self.events is not None),
        )
        return self._info

    async def stats(self) -> WorkerStats:
        metrics = await self._metrics()
        blocks = metrics.num_blocks or 0
        return WorkerStats(
            instance=_instance(metrics, self._base_model),
            running=metrics.running,
            waiting=metrics.waiting,
            waiting_prompt_tokens=0,
            num_blocks=blocks,
            # Cached blocks that nobody uses count as free there.
            free_blocks=blocks - round(blocks * metrics.cache_usage),
            cached_blocks=0,
            steps_total=0,
            prompt_tokens_total=metrics.prompt_tokens,
            cached_tokens_total=metrics.cached_tokens,
            generated_tokens_total=metrics.generated_tokens,
            preemptions_total=metrics.preemptions,
            requests_total=metrics.requests,
            aborted_total=0,
        )

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        info, ids = self._known(), prompt_ids(request)
        max_tokens = most_tokens(request, len(ids), info)
        # vLLM refuses several choices of one greedy answer, which are all the same.
        copies = request.sampling.n if request.sampling.temperature == 0 else 1
        body = completion_body(request, ids, request.model or self._base_model, max_tokens, request.sampling.n // copies)
        response = await self._events_of("/v1/completions", body, headers)
        return CompletionStream(response, self.url, ids, copies=copies)

    async def _metrics(self) -> VllmMetrics:
        metrics = parse_metrics(await self._text("/metrics"))
        if metrics is None:
            raise WorkerUnavailableError(f"worker {self.url} has no vllm: metrics; is it vLLM, with stats on?", reached=True)
        return metrics


def _instance(metrics: VllmMetrics, model: str) -> str:
    return f"vllm-{metrics.life or 'unknown'}-{model}"
