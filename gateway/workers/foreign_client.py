"""What clients of token workers that are not ours share."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from gateway.workers.base import ChunkStream, WorkerRefusedError, WorkerUnavailableError
from gateway.workers.prompt_request import prompt_of
from gateway.workers.protocol import GenerateRequest, RetentionHint, WorkerInfo, WorkerStats
from gateway.workers.spec import WorkerSpec
from gateway.workers.sse_chunks import error_detail, error_of, is_refusal
from gateway.workers.transport import BUSY, Patience, WorkerTransport, read_reply, retry_after
from gateway.workers.vllm.events import VllmEvents
from prefix_cache.events import KVMessage
from prefix_cache.hashing import list_tokens

T = TypeVar("T")

METRICS_BYTES = 8 * 2**20


class ModelCard(msgspec.Struct):
    """Of /v1/models."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class ModelCards(msgspec.Struct):
    data: list[ModelCard]


MODEL_CARDS = msgspec.json.Decoder(ModelCards)


class ForeignClient(ABC):
    """A `Worker` but for `info`, `stats` and `generate`. `what` names its kind in errors."""

    what = "such a server"
    _first_model: str | None = None

    def __init__(self, spec: WorkerSpec, patience: Patience, tls: ssl.SSLContext | None = None) -> None:
        key = spec.api_key
        self._spec = spec
        self._http = WorkerTransport(spec.url, patience, {"Authorization": f"Bearer {key}"} if key is not None else None, tls)
        self._info: WorkerInfo | None = None
        self.events: VllmEvents | None = None
        if spec.events is not None:
            self.events = VllmEvents(spec.url, spec.events, spec.replay, spec.topic, timeout=patience.reply)

    @property
    def url(self) -> str:
        return self._spec.url

    @abstractmethod
    async def info(self) -> WorkerInfo: ...

    @abstractmethod
    async def stats(self) -> WorkerStats: ...

    @abstractmethod
    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> ChunkStream: ...

    async def healthy(self) -> str | None:
        async with self._http.call("GET", "/health") as response:
            return None if response.status == 200 else f"its /health answers {response.status}"

    async def abort(self, request_id: str) -> bool:
        """Closing the connection aborts; there is nothing else to say."""
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

    @property
    def event_trouble(self) -> Mapping[str, int]:
        """`lost`: gaps that nobody could fill. `garbage`: batches that make no sense. `unknown_parent`, `not_named`: events
        left out, as what they follow, or what they hold, has no name here."""
        events = self.events
        if events is None:
            return {}
        blocks = events.blocks
        return {
            "lost": events.lost,
            "garbage": events.garbage,
            "unknown_parent": blocks.unknown_parents if blocks is not None else 0,
            "not_named": blocks.not_named if blocks is not None else 0,
        }

    async def aclose(self) -> None:
        if self.events is not None:
            self.events.close()
        await self._http.aclose()

    def _known(self) -> WorkerInfo:
        if self._info is None:
            raise WorkerUnavailableError(f"worker {self.url} was not asked yet what it serves", reached=True)
        return self._info

    def _name_of(self, base: str) -> str:
        """What the gateway calls a worker's model. `spec.model` stands for the one it had at the first contact: a worker that
        comes back with another one is not taken for it."""
        if self._spec.model is None:
            return base
        self._first_model = self._first_model or base
        return self._spec.model if base == self._first_model else base

    async def _cards(self) -> list[ModelCard]:
        return (await self._get("/v1/models", MODEL_CARDS)).data

    async def _get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        """Raises WorkerUnavailableError, WorkerRefusedError."""
        raw = await self._text(path)
        try:
            return decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkerUnavailableError(
                f"worker {self.url} answers {path} not as {self.what} does: {error}", reached=True
            ) from error

    async def _text(self, path: str) -> bytes:
        async with self._http.call("GET", path) as response:
            if response.status != 200:
                raise await self._as_error(response)
            return await read_reply(response, METRICS_BYTES)

    async def _events_of(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer to a request for generation: a stream of events. Raises WorkerUnavailableError, WorkerRefusedError."""
        response = await self._http.accept(path, body, {**headers, "Content-Type": "application/json"})
        if response.status == 200 and response.content_type == "text/event-stream":
            return response
        try:
            async with asyncio.timeout(self._http.patience.reply):
                if response.status == 200:
                    said = (await read_reply(response, 4096))[:200].decode("utf-8", "replace").strip()
                    raise WorkerUnavailableError(
                        f"worker {self.url} answered 200 and no stream: {said or 'nothing'}", reached=True
                    )
                raise await self._as_error(response)
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {self.url} answered {response.status} and no reason", reached=True) from error
        finally:
            response.close()

    async def _as_error(self, response: aiohttp.ClientResponse) -> WorkerRefusedError | WorkerUnavailableError:
        # The status of the answer counts, not the one that its body says it has.
        message, param = error_of(await read_reply(response))
        if is_refusal(response.status):
            return WorkerRefusedError(response.status, error_detail(message, param))
        return WorkerUnavailableError(
            f"worker {self.url} ({response.status}): {message}",
            reached=True,
            busy=response.status in BUSY,
            retry_after=retry_after(response),
        )


def prompt_ids(request: GenerateRequest) -> list[int]:
    """The prompt's token ids, however the request carries them."""
    tokens = prompt_of(request)
    return list_tokens(tokens.whole()) if tokens is not None else list(request.token_ids or ())


def most_tokens(request: GenerateRequest, prompt_tokens: int, info: WorkerInfo) -> int:
    """What the request asks for, or what its context has left."""
    room = max(info.max_model_len - prompt_tokens, 0)
    asked = request.sampling.max_tokens
    return room if asked is None else min(asked, room)
