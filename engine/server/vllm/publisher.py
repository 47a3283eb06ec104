"""KV events as vLLM publishes them: ZMQ PUB, and a ROUTER that replays what a subscriber missed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from engine.server.listen import ListenError
from engine.server.vllm.token_book import TokenBook
from engine.thread import EngineThread
from prefix_cache.events import DEVICE, HOST, AllCleared, BlocksRemoved, BlocksStored, EventBatch, KVEvent
from prefix_cache.hashing import BlockHash, split_digests, unpack_tokens
from prefix_cache.vllm_wire import (
    END_OF_REPLAY,
    ForeignCleared,
    ForeignEvent,
    ForeignRemoved,
    ForeignStored,
    encode_batch,
)

logger = logging.getLogger(__name__)

_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 * 2**20
_BATCHES_AT_ONCE = 64
_QUEUED_MESSAGES = 100_000
_MEDIA = {DEVICE: "GPU", HOST: "CPU"}


class KVEventPublisher:
    """Publishes what `engine` stores and evicts, from `start` to `aclose`. Batches are numbered from 0; 10,000 are kept for
    replay.

    Block hashes are the first 64 bits of our digests, as unsigned integers, which is what vLLM sends by default. Blocks whose
    tokens are not known any more are left out, with what follows them, and counted in `unnamed`.
    """

    def __init__(self, engine: EngineThread, address: str, replay: str | None, topic: str) -> None:
        self._engine = engine
        self._address = address
        self._replay = replay
        self._topic = topic.encode()
        info = engine.info
        self.book = TokenBook(bytes.fromhex(info.namespace), info.block_size, 4 * info.num_blocks + 8192)
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered = 0
        self._next = 0
        self.unnamed = 0

    async def start(self) -> None:
        """Binds the sockets. Raises ListenError."""
        self._context = zmq.asyncio.Context()
        try:
            pub = self._bind(zmq.PUB, self._address)
            router = self._bind(zmq.ROUTER, self._replay) if self._replay is not None else None
        except ListenError:
            await self.aclose()
            raise
        self._engine.observers.append(self.book)
        self._tasks.append(asyncio.create_task(self._publish(pub), name="kv-events"))
        if router is not None:
            self._tasks.append(asyncio.create_task(self._serve_replays(router), name="kv-replay"))

    async def aclose(self) -> None:
        """Ends it; idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(0)

    def _bind(self, kind: int, address: str) -> Any:
        if self._context is None:
            raise RuntimeError("the publisher was closed")
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ListenError(f"Cannot publish KV events at {address}: {error}. Choose another with --kv-events.") from error
        return socket

    async def _publish(self, socket: Any) -> None:
        wake = asyncio.Event()
        log = self._engine.events
        place = log.subscribe(log.instance, log.seq, wake.set)
        try:
            while True:
                wake.clear()
                if place.needs_snapshot:
                    # Too slow for the log: nobody can be told what changed meanwhile, so everything counts as gone.
                    place.give(log.snapshot({}))
                    await self._send(socket, [ForeignCleared()])
                batches = place.read(_BATCHES_AT_ONCE)
                for batch in batches:
                    events = self._converted(batch)
                    if events:
                        await self._send(socket, events)
                if not batches:
                    await wake.wait()
        finally:
            place.close()

    async def _send(self, socket: Any, events: Sequence[ForeignEvent]) -> None:
        payload = encode_batch(time.time(), events)
        number, self._next = self._next, self._next + 1
        self._buffer.append((number, payload))
        self._buffered += len(payload)
        while len(self._buffer) > _KEPT_BATCHES or (self._buffered > _KEPT_BYTES and len(self._buffer) > 1):
            self._buffered -= len(self._buffer.popleft()[1])
        await socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _serve_replays(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a request for KV events again that makes no sense was left unanswered")
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in tuple(self._buffer):
                if number >= start:
                    await socket.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def _converted(self, batch: EventBatch) -> list[ForeignEvent]:
        events: list[ForeignEvent] = []
        for event in batch.events:
            converted = self._event(event)
            if converted is not None:
                events.append(converted)
        return events

    def _event(self, event: KVEvent) -> ForeignEvent | None:
        match event:
            case AllCleared():
                return ForeignCleared()
            case BlocksRemoved():
                return ForeignRemoved(tuple(map(_name, split_digests(event.digests))), _MEDIA.get(event.tier, "STORAGE"))
            case BlocksStored():
                return self._stored(event)

    def _stored(self, event: BlocksStored) -> ForeignStored | None:
        names: list[int] = []
        tokens = bytearray()
        for digest in split_digests(event.digests):
            packed = self.book.tokens(digest)
            if packed is None:
                self.unnamed += 1
                break
            names.append(_name(digest))
            tokens += packed
        if not names:
            return None
        first = self.book.is_root(event.parent)
        return ForeignStored(
            tuple(names),
            None if first else _name(event.parent),
            tuple(unpack_tokens(bytes(tokens)).tolist()),
            self._engine.info.block_size,
            _MEDIA.get(event.tier, "STORAGE"),
            salt=self.book.salt(event.parent) if first else None,
        )


def _name(digest: BlockHash) -> int:
    return int.from_bytes(digest[:8], "big")
