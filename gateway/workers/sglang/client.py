"""A `Worker` for SGLang's native server."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from gateway.workers.base import ChunkStream, WorkerError, WorkerUnavailableError
from gateway.workers.foreign import foreign_namespace
from gateway.workers.foreign_client import ForeignClient, most_tokens, prompt_ids
from gateway.workers.prometheus import Scanner
from gateway.workers.protocol import PROTOCOL_VERSION, Capabilities, GenerateRequest, WorkerInfo, WorkerStats
from gateway.workers.sglang.requests import generate_body
from gateway.workers.sglang.stream import GenerateStream

log = logging.getLogger(__name__)

_SCANNER = Scanner(
    (
        "process_start_time_seconds",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:cached_tokens_total",
    )
)
_SMALLEST_PAGE = 8
_GATEWAY_BLOCK = 16


class _ServerInfo(msgspec.Struct):
    page_size: int = 1
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    random_seed: int | None = None
    served_model_name: str | None = None


_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)


class SglangClient(ForeignClient):
    """SGLang at `spec.url`. A life of the process is told by its random seed, drawn at its start, and by its start time where
    it has metrics; load is known with --enable-metrics only.

    Its blocks are pages. Pages under 8 tokens (its default is one) are not followed: naming each token of a prompt would cost
    the gateway more than it saves; start it with --page-size 16.
    """

    what = "SGLang"
    _seed: int | None = None
    _base_model = ""
    _blocks = 0
    _complained = False

    async def info(self) -> WorkerInfo:
        cards = await self._cards()
        server = await self._server()
        bases = [card for card in cards if card.parent is None]
        if not bases:
            raise WorkerUnavailableError(f"worker {self.url} serves no model; is it SGLang?", reached=True)
        base = bases[0]
        followed = self.events is not None and server.page_size >= _SMALLEST_PAGE
        if self.events is not None and not followed and not self._complained:
            self._complained = True
            log.warning(
                "worker %s: its KV events are not followed, as its pages have %d tokens; start it with --page-size 16",
                self.url,
                server.page_size,
            )
        block_size = server.page_size if server.page_size >= _SMALLEST_PAGE else _GATEWAY_BLOCK
        name = self._name_of(base.id)
        self._seed, self._base_model = server.random_seed, base.id
        self._blocks = (server.max_total_num_tokens or 0) // block_size
        values = await self._values()
        self._info = WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            instance=self._instance(values),
            model=name,
            namespace=foreign_namespace(name, block_size).hex(),
            block_size=block_size,
            num_blocks=self._blocks,
            max_model_len=base.max_model_len or server.context_length or 0,
            vocab_size=0,
            max_concurrency=server.max_running_requests or self._spec.concurrency,
            adapters=tuple(card.id for card in cards if card is not base and card.id != name),
            capabilities=Capabilities(kv_events=followed),
        )
        if self._info.max_model_len == 0:
            raise WorkerUnavailableError(f"worker {self.url} does not say how long its context is", reached=True)
        return self._info

    async def stats(self) -> WorkerStats:
        values = await self._values()

        def total(name: str) -> int:
            return int(sum(values.get(f"sglang:{name}", ())))

        usage = values.get("sglang:token_usage") or [0.0]
        used = min(max(sum(usage) / len(usage), 0.0), 1.0)
        return WorkerStats(
            instance=self._instance(values),
            running=max(total("num_running_reqs"), 0),
            waiting=max(total("num_queue_reqs"), 0),
            waiting_prompt_tokens=0,
            num_blocks=self._blocks,
            free_blocks=self._blocks - round(self._blocks * used),
            cached_blocks=0,
            steps_total=0,
            prompt_tokens_total=total("prompt_tokens_total"),
            cached_tokens_total=total("cached_tokens_total"),
            generated_tokens_total=total("generation_tokens_total"),
            preemptions_total=0,
            requests_total=0,
            aborted_total=0,
        )

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        info, ids = self._known(), prompt_ids(request)
        max_tokens = most_tokens(request, len(ids), info)
        adapter = request.model if request.model not in (None, self._base_model, info.model) else None
        response = await self._events_of("/generate", generate_body(request, ids, max_tokens, adapter), headers)
        sampling = request.sampling
        return GenerateStream(response, self.url, len(ids), max_tokens, sampling.n, sampling.logprobs)

    async def abort(self, request_id: str) -> bool:
        """SGLang notices a closed connection only with the next token, so it is told."""
        body = msgspec.json.encode({"rid": request_id})
        async with self._http.call("POST", "/abort_request", body, {"Content-Type": "application/json"}) as response:
            return response.status == 200

    async def _server(self) -> _ServerInfo:
        try:
            return await self._get("/get_server_info", _SERVER_INFO)
        except WorkerUnavailableError as error:
            try:
                return await self._get("/server_info", _SERVER_INFO)
            except WorkerError:
                raise error from None

    async def _values(self) -> dict[str, list[float]]:
        """Samples by name; none where it was started without metrics, but that it answers is known all the same."""
        try:
            return _SCANNER.scan(await self._text("/metrics"))
        except WorkerUnavailableError:
            await self._get("/get_model_info", _SERVER_INFO)
            return {}

    def _instance(self, values: dict[str, list[float]]) -> str:
        born = values.get("process_start_time_seconds")
        return f"sglang-{self._seed}-{f'{born[0]:.3f}' if born else 'unknown'}-{self._base_model}"
