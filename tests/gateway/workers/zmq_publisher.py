"""A publisher of KV events that behaves as vLLM's does: PUB, and a ROUTER that replays what is kept."""

import asyncio
import contextlib

import zmq
import zmq.asyncio

from prefix_cache.vllm_wire import END_OF_REPLAY, encode_batch


class Publisher:
    def __init__(self, keep=100):
        self.keep, self.buffer, self.next, self.replays = keep, [], 0, []
        self.replays_topic = True
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"

    async def __aenter__(self):
        self._task = asyncio.create_task(self._serve_replays())
        return self

    async def __aexit__(self, *exc):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(0)

    async def subscribed(self):
        """Waits for the next subscriber."""
        async with asyncio.timeout(5):
            while (await self._pub.recv())[:1] != b"\x01":
                pass

    async def publish(self, *events, lose=False, raw=None):
        payload = raw if raw is not None else encode_batch(0.0, events)
        number, self.next = self.next, self.next + 1
        self.buffer = [*self.buffer, (number, payload)][-self.keep :]
        if not lose:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def stop_replays(self):
        self._task.cancel()

    def restart(self):
        self.buffer, self.next = [], 0

    async def _serve_replays(self):
        while True:
            client, _, start = await self._router.recv_multipart()
            topic = [b""] if self.replays_topic else []
            self.replays.append(int.from_bytes(start, "big"))
            for number, payload in self.buffer:
                if number >= self.replays[-1]:
                    await self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *topic, END_OF_REPLAY, b""])
