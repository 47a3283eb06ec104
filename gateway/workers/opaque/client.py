"""A `Worker` of which nothing is known but that it speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import xxhash

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.foreign import foreign_namespace
from gateway.workers.opaque.memory import ChunkMemory
from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    Capabilities,
    ErrorDetail,
    GenerateRequest,
    RetentionHint,
    WorkerInfo,
    WorkerStats,
)
from gateway.workers.spec import WorkerSpec
from gateway.workers.transport import Patience, WorkerTransport, read_reply
from prefix_cache.events import KVMessage

CHUNK_TOKENS = 64
"""Tokens that a chunk of text is taken to have: 256 bytes, at four bytes a token."""
_ASK_EVERY = 10.0
_HEARTBEAT_SECONDS = 5.0
_MAX_MODELS = 1000
_CONTEXT = 2**31 - 1


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


class OpaqueClient:
    """An OpenAI-compatible server at `spec.url` (what comes before /v1). Bodies go there by `forward`, never by `generate`.

    It serves the models that its /v1/models lists, or `spec.model` alone. It is asked for that every ten seconds; other models
    than before are another life.
    """

    def __init__(self, spec: WorkerSpec, patience: Patience, tls: ssl.SSLContext | None = None) -> None:
        self._spec = spec
        self._http = WorkerTransport(
            spec.url, patience, {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key is not None else None, tls
        )
        self.memory = ChunkMemory(f"opaque-{time.time_ns():x}")
        self._models: tuple[str, ...] = ()
        self._asked: float | None = None

    @property
    def url(self) -> str:
        return self._spec.url

    async def info(self) -> WorkerInfo:
        await self._ask()
        first, *others = self._models
        return WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            instance=self._instance,
            model=first,
            namespace=foreign_namespace(first, CHUNK_TOKENS).hex(),
            block_size=CHUNK_TOKENS,
            num_blocks=0,
            max_model_len=_CONTEXT,
            vocab_size=0,
            max_concurrency=self._spec.concurrency,
            adapters=tuple(others),
            capabilities=Capabilities(token_prompts=False, grammars=False, logprobs=False),
        )

    async def stats(self) -> WorkerStats:
        if self._asked is None or time.monotonic() - self._asked > _ASK_EVERY:
            await self._ask()
        zeros: dict[str, Any] = dict.fromkeys(WorkerStats.__struct_fields__[1:14], 0)
        return WorkerStats(instance=self._instance, **zeros)

    async def healthy(self) -> str | None:
        await self._ask()
        return None

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream:
        raise WorkerRefusedError(400, ErrorDetail("unsupported", f"Worker {self.url} takes no token ids."))

    async def forward(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends a body as it is, and returns with the head of the answer, whatever its status. Close it when done."""
        return await self._http.accept(path, body, headers)

    async def abort(self, request_id: str) -> bool:
        """Closing the connection is all that can be done."""
        return False

    async def retain(self, hints: Sequence[RetentionHint]) -> int:
        return 0

    async def supersede(self, digests: bytes) -> int:
        return 0

    async def kv_events(self, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        """What is supposed of its cache."""
        readable = asyncio.Event()
        log = self.memory.log
        place = log.subscribe(instance if instance == self._instance else None, after, readable.set)
        try:
            while True:
                if place.needs_snapshot:
                    snapshot = log.snapshot({"device": self.memory.held()})
                    yield msgspec.structs.replace(snapshot, instance=self._instance)
                    place.give(snapshot)
                readable.clear()
                batches = place.read(100)
                for batch in batches:
                    yield msgspec.structs.replace(batch, instance=self._instance)
                if batches:
                    continue
                try:
                    async with asyncio.timeout(_HEARTBEAT_SECONDS):
                        await readable.wait()
                except TimeoutError:
                    yield msgspec.structs.replace(log.heartbeat(), instance=self._instance)
        finally:
            place.close()

    async def aclose(self) -> None:
        await self._http.aclose()

    @property
    def _instance(self) -> str:
        return f"{self.memory.log.instance}-{xxhash.xxh3_64_hexdigest(' '.join(self._models).encode())}"

    async def _ask(self) -> None:
        async with self._http.call("GET", "/v1/models") as response:
            raw = await read_reply(response)
            if response.status in (401, 403):
                raise WorkerUnavailableError(f"worker {self.url} does not take the gateway's key (key-env=NAME)", reached=True)
            if response.status != 200:
                raise WorkerUnavailableError(f"worker {self.url}: its /v1/models answers {response.status}", reached=True)
        try:
            listed = tuple(dict.fromkeys(model.id for model in _MODELS.decode(raw).data if model.id))[:_MAX_MODELS]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkerUnavailableError(
                f"worker {self.url}: its /v1/models is no list of models: {error}", reached=True
            ) from error
        if self._spec.model is not None:
            if self._spec.model not in listed:
                raise WorkerUnavailableError(f"worker {self.url} does not list the model '{self._spec.model}'", reached=True)
            listed = (self._spec.model,)
        if not listed:
            raise WorkerUnavailableError(f"worker {self.url} lists no models", reached=True)
        self._models, self._asked = listed, time.monotonic()
