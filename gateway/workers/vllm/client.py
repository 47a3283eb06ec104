"""A `Worker` for vLLM's OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import aiohttp
import msgspec

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.foreign import foreign_namespace
from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    Capabilities,
    GenerateRequest,
    RetentionHint,
    WorkerInfo,
    WorkerStats,
)
from gateway.workers.spec import WorkerSpec
from gateway.workers.transport import BUSY, Patience, WorkerTransport, read_reply, retry_after
from gateway.workers.vllm.events import VllmEvents
from gateway.workers.vllm.metrics import VllmMetrics, parse_metrics
from gateway.workers.vllm.requests import completion_body, prompt_ids
from gateway.workers.vllm.stream import NO_ERROR, CompletionStream, error_detail, error_parts, is_refusal
from prefix_cache.events import KVMessage

_METRICS_BYTES = 8 * 2**20
_DEFAULT_BLOCK_SIZE = 16


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _FlatError(msgspec.Struct):
    error: msgspec.Raw = NO_ERROR
    message: str = ""
    code: int | None = None


_MODELS = msgspec.json.Decoder(_Models)
_ERRORS = msgspec.json.Decoder(_FlatError)


class VllmClient:
    """vLLM at `spec.url`. Its adapters (LoRA) are served under their own names; its base model as `spec.model`, where given.

    A life of the process is told by its start time in /metrics. KV events need `spec.events`; without `spec.replay` only what
    is stored after the gateway subscribed is known.
    """

    def __init__(self, spec: WorkerSpec, patience: Patience) -> None:
        self._spec = spec
        self._http = WorkerTransport(
            spec.url, patience, {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key is not None else None
        )
        self._base_model: str | None = None
        self._info: WorkerInfo | None = None
        self.events: VllmEvents | None = None
        if spec.events is not None:
            self.events = VllmEvents(spec.url, spec.events, spec.replay, spec.topic, timeout=patience.reply)

    @property
    def url(self) -> str:
        return self._spec.url

    async def info(self) -> WorkerInfo:
        async with self._http.call("GET", "/v1/models") as response:
            models = await self._decode(response, _MODELS)
        bases = [model for model in models.data if model.parent is None and model.max_model_len]
        if not bases:
            raise WorkerUnavailableError(f"worker {self.url} serves no model; is it vLLM?", reached=True)
        metrics = await self._metrics()
        base = bases[0]
        name = self._spec.model or base.id
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
            adapters=tuple(model.id for model in models.data if model is not base and model.id != name),
            capabilities=Capabilities(kv_events=self.events is not None),
        )
        return self._info

    async def stats(self) -> WorkerStats:
        metrics = await self._metrics()
        blocks = metrics.num_blocks or 0
        return WorkerStats(
            instance=_instance(metrics, self._base_model or ""),
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

    async def healthy(self) -> str | None:
        async with self._http.call("GET", "/health") as response:
            return None if response.status == 200 else f"its /health answers {response.status}"

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        info = self._info
        if info is None or self._base_model is None:
            raise WorkerUnavailableError(f"worker {self.url} was not asked yet what it serves", reached=True)
        ids = prompt_ids(request)
        room = max(info.max_model_len - len(ids), 0)
        max_tokens = room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)
        # vLLM refuses several choices of one greedy answer, which are all the same.
        copies = request.sampling.n if request.sampling.temperature == 0 else 1
        body = completion_body(request, ids, request.model or self._base_model, max_tokens, request.sampling.n // copies)
        response = await self._http.accept("/v1/completions", body, {**headers, "Content-Type": "application/json"})
        if response.status == 200:
            if not response.content_type.startswith("text/event-stream"):
                raise await self._not_a_stream(response)
            return CompletionStream(response, self.url, ids, copies=copies)
        try:
            async with asyncio.timeout(self._http.patience.reply):
                raise await self._as_error(response)
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self.url} answered {response.status} and no reason", reached=True) from error
        finally:
            response.release()

    async def abort(self, request_id: str) -> bool:
        """vLLM aborts what its client has closed the connection of; there is nothing else to tell it."""
        return False

    async def retain(self, hints: Sequence[RetentionHint]) -> int:
        return 0

    async def supersede(self, digests: bytes) -> int:
        return 0

    async def kv_events(self, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        if self.events is None:
            raise WorkerUnavailableError(f"worker {self.url} was given no address of its KV events", reached=True)
        info = await self.info()
        async for message in self.events.follow(info, instance, after):
            yield message

    async def aclose(self) -> None:
        if self.events is not None:
            self.events.close()
        await self._http.aclose()

    async def _metrics(self) -> VllmMetrics:
        async with self._http.call("GET", "/metrics") as response:
            if response.status != 200:
                raise await self._as_error(response)
            text = await read_reply(response, _METRICS_BYTES)
        metrics = parse_metrics(text)
        if metrics is None:
            raise WorkerUnavailableError(f"worker {self.url} has no vllm: metrics; is it vLLM, with stats on?", reached=True)
        return metrics

    async def _decode(self, response: aiohttp.ClientResponse, decoder: msgspec.json.Decoder[_Models]) -> _Models:
        if response.status != 200:
            raise await self._as_error(response)
        try:
            return decoder.decode(await read_reply(response))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkerUnavailableError(
                f"worker {self.url} answers {response.url.path} not as vLLM does: {error}", reached=True
            ) from error

    async def _not_a_stream(self, response: aiohttp.ClientResponse) -> WorkerUnavailableError:
        """A 200 with something else than events."""
        text = (await read_reply(response, 4096))[:200].decode("utf-8", "replace").strip()
        response.close()
        return WorkerUnavailableError(f"worker {self.url} answered 200 and no stream: {text or 'nothing'}", reached=True)

    async def _as_error(self, response: aiohttp.ClientResponse) -> WorkerRefusedError | WorkerUnavailableError:
        raw = await read_reply(response)
        try:
            body = _ERRORS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = _FlatError(message=raw[:200].decode("utf-8", "replace").strip())
        # The status of the answer counts, not the one it says it has.
        _, message, param = error_parts(body.error, body.message, None)
        if is_refusal(response.status):
            return WorkerRefusedError(response.status, error_detail(message, param))
        return WorkerUnavailableError(
            f"worker {self.url} ({response.status}): {message}",
            reached=True,
            busy=response.status in BUSY,
            retry_after=retry_after(response),
        )


def _instance(metrics: VllmMetrics, model: str) -> str:
    return f"vllm-{metrics.life or 'unknown'}-{model}"
