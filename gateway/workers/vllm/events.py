"""vLLM's KV events over ZMQ: subscribed to, gaps filled from its replay socket, told as our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.foreign import adapter_namespace
from gateway.workers.protocol import WorkerInfo
from prefix_cache.events import EventBatch, Heartbeat, KVEvent, KVMessage, Snapshot
from prefix_cache.foreign_blocks import ForeignBlocks
from prefix_cache.hashing import BlockHash, root_digest
from prefix_cache.vllm_wire import END_OF_REPLAY, decode_batch

log = logging.getLogger(__name__)

_MAX_MESSAGE = 64 * 2**20
_QUEUED_BATCHES = 100_000
_HEARTBEAT_SECONDS = 5.0

Numbered = tuple[int, bytes]


class VllmEvents:
    """One worker's event stream. Its batches are numbered from 0 in each life of the worker; ours from 1.

    The stream says nothing about lives: the caller asks the worker which it is, before and in between. Batches that neither
    come nor are replayed are lost: all that was known is forgotten then, as it may be gone. `lost` counts such gaps, `garbage`
    batches that make no sense.
    """

    def __init__(self, url: str, address: str, replay: str | None, topic: str, *, timeout: float) -> None:
        self._url = url
        self._address = address
        self._replay_address = replay
        self._topic = topic.encode()
        self._timeout = timeout
        self._context: zmq.asyncio.Context | None = None
        self._instance: str | None = None
        self._blocks: ForeignBlocks | None = None
        self._next = 0
        self.lost = 0
        self.garbage = 0
        self.replayed = 0

    @property
    def blocks(self) -> ForeignBlocks | None:
        """What is known of the worker's blocks; None before the first subscription."""
        return self._blocks

    async def follow(self, info: WorkerInfo, instance: str | None, after: int) -> AsyncGenerator[KVMessage, None]:
        """Messages for somebody who has seen batch `after` of `instance`. Ends when the worker seems to have begun another
        life.

        Raises WorkerUnavailableError when its sockets cannot be used.
        """
        fresh = self._blocks is None or self._instance != info.instance or instance != info.instance or after != self._next
        if fresh:
            self._begin(info)
        socket = self._subscribe()
        try:
            # Subscribed first, replayed then: nothing falls between the two.
            batches = await self._replayed(self._next) or []
            if fresh:
                self._next = batches[0][0] if batches else 0
                yield Snapshot(info.instance, self._next, {})
            for message in self._take(batches):
                yield message
            nothing_known = fresh and not batches
            while True:
                try:
                    async with asyncio.timeout(_HEARTBEAT_SECONDS):
                        number, payload = await self._receive(socket)
                except TimeoutError:
                    # A publisher that cannot be reached is as silent as one that has nothing to say; its replay tells which,
                    # and whether the last batches got lost.
                    missed = await self._replayed(self._next)
                    if missed:
                        for message in self._take(missed):
                            yield message
                    elif missed is not None or self._replay_address is None:
                        yield Heartbeat(info.instance, self._next)
                    continue
                if number < self._next:
                    if number == 0:
                        return  # It counts from the beginning again: another life.
                    continue
                batches = [(number, payload)]
                if number > self._next and nothing_known:
                    self._next = number  # What was before the subscription and cannot be replayed is not lost to us now.
                    yield Snapshot(info.instance, number, {})
                nothing_known = False
                if number > self._next:
                    missing = await self._replayed(self._next) or []
                    batches = [batch for batch in missing if batch[0] < number] + batches
                    if batches[0][0] != self._next:
                        yield self._lose(info.instance, batches[0][0])
                for message in self._take(batches):
                    yield message
        except zmq.ZMQError as error:
            raise WorkerUnavailableError(
                f"the KV events of worker {self._url} at {self._address}: {error}", reached=True
            ) from error
        finally:
            socket.close(0)

    def close(self) -> None:
        """Closes the sockets; idempotent."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(0)

    def _begin(self, info: WorkerInfo) -> None:
        base = bytes.fromhex(info.namespace)

        def root(adapter: str | None, salt: str | None) -> BlockHash | None:
            if adapter is not None and adapter not in info.adapters:
                return None
            return root_digest(base if adapter is None else adapter_namespace(base, adapter), salt)

        self._instance = info.instance
        self._blocks = ForeignBlocks(root, info.block_size)
        self._next = 0

    def _lose(self, instance: str, upto: int) -> Snapshot:
        """Batches before `upto` will never be known."""
        self.lost += 1
        log.warning(
            "worker %s: KV events %d to %d are lost; what was known of its cache is forgotten", self._url, self._next, upto - 1
        )
        if self._blocks is not None:
            self._blocks.clear()
        self._next = upto
        return Snapshot(instance, upto, {})

    def _take(self, batches: list[Numbered]) -> list[KVMessage]:
        """Messages for batches in order; those seen before are skipped, and a gap among them loses what was before it."""
        messages: list[KVMessage] = []
        blocks, instance = self._blocks, self._instance
        if blocks is None or instance is None:
            return messages
        for number, payload in batches:
            if number < self._next:
                continue
            if number > self._next:
                messages.append(self._lose(instance, number))
            changed: list[KVEvent] = []
            try:
                for event in decode_batch(payload):
                    changed += blocks.apply(event)
            except ValueError as error:
                self.garbage += 1
                if self.garbage == 1:
                    log.warning("worker %s sent KV events that make no sense: %s", self._url, error)
            self._next = number + 1
            messages.append(EventBatch(instance, self._next, tuple(changed)))
        return messages

    def _subscribe(self) -> Any:
        socket = self._open(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_BATCHES)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        socket.connect(self._address)
        return socket

    def _open(self, kind: int) -> Any:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        return socket

    async def _receive(self, socket: Any) -> Numbered:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) >= 3 and len(frames[-2]) == 8:
                return int.from_bytes(frames[-2], "big"), frames[-1]
            self.garbage += 1

    async def _replayed(self, start: int) -> list[Numbered] | None:
        """Batches from `start` on that the worker still has. None where it has no replay socket, or does not answer in time."""
        if self._replay_address is None:
            return None
        socket = self._open(zmq.DEALER)
        batches: list[Numbered] = []
        size = 0
        try:
            socket.connect(self._replay_address)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            async with asyncio.timeout(self._timeout):
                while size < _MAX_MESSAGE * 4:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or len(frames[-2]) != 8 or frames[-2] == END_OF_REPLAY:
                        break
                    batches.append((int.from_bytes(frames[-2], "big"), frames[-1]))
                    size += len(frames[-1])
                    self.replayed += 1
        except TimeoutError:
            log.debug("worker %s: its KV event replay at %s does not answer", self._url, self._replay_address)
            return None
        finally:
            socket.close(0)
        return batches
