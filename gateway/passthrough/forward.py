"""One body on its way to an opaque worker: placed like a turn, sent, sent elsewhere while nothing has come of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from gateway.dispatch import PoolDispatcher
from gateway.turn import Receipt, SessionRef, TurnError
from gateway.workers.attempt import Attempt
from gateway.workers.base import WorkerUnavailableError
from gateway.workers.endings import exhausted
from gateway.workers.opaque.client import OpaqueClient
from gateway.workers.protocol import Chunk, Started
from gateway.workers.transport import BUSY, describe, read_reply, retry_after
from prefix_cache.hashing import BlockHash

log = logging.getLogger(__name__)

_NOT_THE_CLIENTS = frozenset({401, 403, 407})


class _Connection:
    """What a member drops when its worker is removed or frozen: a `ChunkStream` of which only the end is used."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    def __aiter__(self) -> _Connection:
        return self

    async def __anext__(self) -> Chunk:
        raise StopAsyncIteration

    def close(self) -> None:
        self.response.close()

    async def finish(self) -> None:
        self.response.release()


@dataclass(frozen=True, slots=True)
class Text:
    """A body as routing sees it. `digests`: of its chunks, under `root`; `tokens`: a guess."""

    digests: Sequence[BlockHash]
    root: BlockHash
    tokens: int


class Forwarding:
    """A body at a worker, which has begun to answer. `close` it, whatever happens."""

    def __init__(self, attempt: Attempt, client: OpaqueClient, response: aiohttp.ClientResponse, text: Text) -> None:
        self._attempt = attempt
        self._client = client
        self._text = text
        self._over = False
        self.response = response

    @property
    def receipt(self) -> Receipt:
        """Where it went and why."""
        return self._attempt.route.receipt

    async def read(self) -> bytes:
        """The next bytes of the answer; b"" at its end. Raises WorkerUnavailableError when it breaks off."""
        try:
            data = await self.response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WorkerUnavailableError(
                f"worker {self._client.url} broke off its answer: {describe(error)}", reached=True
            ) from error
        if data:
            self._attempt.member.heard()
            self._attempt.token()
        return data

    def answered(self, cached_share: float | None) -> None:
        """It came to its end; its text is in the worker's cache now."""
        self._over = True
        self._attempt.done()
        self._client.memory.answered(self._text.digests, self._text.root, cached_share)
        self.response.release()

    def refused(self) -> None:
        """The worker would not have it as it is: nothing was computed, nothing is wrong with the worker."""
        self._over = True
        self._attempt.done()
        self.response.release()

    def failed(self, error: WorkerUnavailableError) -> None:
        """It broke off, or makes no sense."""
        self._over = True
        self._attempt.failed(error)

    def close(self) -> None:
        """Ends it at once where it has not ended; idempotent."""
        if not self._over:
            self._over = True
            self._attempt.abandon()


async def forward(
    dispatcher: PoolDispatcher,
    *,
    model: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    text: Text,
    session: SessionRef,
    request_id: str,
    max_attempts: int,
) -> Forwarding:
    """Sends a body to the worker that the router chooses. Raises TurnError when none takes it."""
    excluded: set[str] = set()
    last: WorkerUnavailableError | None = None
    for number in range(max_attempts):
        try:
            placement = dispatcher.place_text(model, session, text.digests, text.tokens, excluded)
        except TurnError:
            if last is None:
                raise
            raise exhausted(last, number) from last
        attempt, client = Attempt(placement, request_id), placement.member.client
        if not isinstance(client, OpaqueClient):
            attempt.abandon()
            raise TypeError(f"worker {attempt.member.name} is no opaque one")
        attempt.member.sent()
        try:
            response = await client.forward(path, body, headers)
            attempt.accepted(_Connection(response))
            await _raise_for(response, client)
        except WorkerUnavailableError as error:
            attempt.failed(error)
            excluded.add(attempt.member.name)
            last = error
            log.warning("request %s failed on %s before its answer: %s", request_id, attempt.member.name, error)
            continue
        except BaseException:
            attempt.abandon()
            raise
        attempt.started(Started(text.tokens, min(placement.route.receipt.matched_tokens, text.tokens), 0.0, False))
        return Forwarding(attempt, client, response, text)
    if last is None:
        raise ValueError(f"max_attempts must be at least 1, not {max_attempts}")
    raise exhausted(last, max_attempts) from last


async def _raise_for(response: aiohttp.ClientResponse, client: OpaqueClient) -> None:
    """Raises WorkerUnavailableError for an answer that is the worker's failure, not the client's."""
    status = response.status
    if status < 500 and status not in BUSY and status not in _NOT_THE_CLIENTS and not 300 <= status < 400:
        return
    seconds = retry_after(response)
    try:
        async with asyncio.timeout(5.0):
            said = (await read_reply(response, 4096))[:300].decode("utf-8", "replace").strip()
    except (TimeoutError, WorkerUnavailableError):
        said = ""
    if status in _NOT_THE_CLIENTS:
        said = "it does not take the gateway's key"
    raise WorkerUnavailableError(
        f"worker {client.url} answered {status}: {said or 'no reason given'}",
        reached=True,
        busy=status in BUSY,
        retry_after=seconds,
    )
