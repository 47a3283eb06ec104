"""Tool gaps shared by several gateways through Redis: each adds what it saw, and takes over what all of them together saw.

Adding commutes, so nothing is compared and nobody waits for anybody. Weights fade by the clock of the server (forward decay, as
in sessions.gaps.histogram), so that gateways whose clocks differ agree. While Redis is gone, each goes on with what it knows,
and passes on later what it saw meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from sessions.gaps.model import GapConfig, Key, ToolGapModel
from sessions.redis_link import RedisLink
from sessions.redis_scripts import ADD_GAPS, READ_GAPS

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

FORMAT = 1
_BUDGET = 1.0
_BATCH = 128
_OVERLAP = 2.0


class SharedGaps:
    """Keeps a `ToolGapModel` in step with Redis, every `interval` seconds. `start` it on the loop, `aclose` it in the end."""

    def __init__(self, model: ToolGapModel, link: RedisLink, config: GapConfig, *, interval: float = 2.0) -> None:
        self._model = model
        self._link = link
        self._config = config
        self._interval = interval
        self._add = link.client.register_script(ADD_GAPS)
        self._read = link.client.register_script(READ_GAPS)
        self._base = f"{link.config.prefix}:{FORMAT}:g"
        # Half-lives far beyond which nothing of a histogram is left.
        self._ttl = int(min(max(link.config.ttl, 16 * config.half_life), 10**8))
        self._seen_until = 0.0
        self._task: asyncio.Task[None] | None = None
        model.share()

    def start(self) -> None:
        """Begins."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def sync(self) -> bool:
        """One exchange: passes on what was seen here, takes over what was seen elsewhere. False when Redis was not there."""
        if not await self._pass_on():
            return False
        return await self._take_over()

    async def aclose(self) -> None:
        """Passes on the rest, for a second at most; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._pass_on()

    async def _run(self) -> None:
        while True:
            await self.sync()
            await asyncio.sleep(self._interval)

    async def _pass_on(self) -> bool:
        unsent = list(self._model.take_unsent().items())
        for start in range(0, len(unsent), _BATCH):
            batch = dict(unsent[start : start + _BATCH])
            try:
                done = await self._link.call("gaps", functools.partial(self._send, batch), False, budget=_BUDGET)
            except asyncio.CancelledError:
                self._model.give_back(dict(unsent[start:]))
                raise
            if not done:
                # It may have been added all the same: gaps that count twice change no quantile much; lost ones are worse.
                self._model.give_back(dict(unsent[start:]))
                return False
        return True

    async def _send(self, batch: Mapping[Key, Mapping[int, float]], redis: Redis) -> bool:
        async with redis.pipeline(transaction=False) as pipe:
            for key, buckets in batch.items():
                pairs = [part for bucket, weight in buckets.items() for part in (bucket, repr(weight))]
                args: list[bytes | str | int | float] = [
                    self._config.half_life,
                    self._ttl,
                    _member(key),
                    self._config.max_tools,
                ]
                await self._add(keys=[self._histogram(key), f"{self._base}:index"], args=[*args, *pairs], client=pipe)
            await pipe.execute()
        return True

    async def _take_over(self) -> bool:
        low, limit = self._seen_until - _OVERLAP, self._config.max_tools

        async def changed(redis: Redis) -> Any:
            answer: Awaitable[Any] = redis.zrevrangebyscore(f"{self._base}:index", "+inf", low, 0, limit, withscores=True)
            return await answer

        members = await self._link.call("gaps", changed, None, budget=_BUDGET)
        if members is None:
            return False
        # The least recent first, so that they are the first to go when there are too many.
        keys = [(key, score) for member, score in reversed(members) if (key := _key(member)) is not None]
        for start in range(0, len(keys), _BATCH):
            batch = [key for key, _ in keys[start : start + _BATCH]]
            answers = await self._link.call("gaps", functools.partial(self._fetch, batch), None, budget=_BUDGET)
            if answers is None:
                return False
            for key, answer in zip(batch, answers, strict=True):
                buckets = _buckets(answer)
                if buckets:
                    self._model.replace(*key, buckets)
            self._seen_until = max(self._seen_until, keys[min(start + _BATCH, len(keys)) - 1][1])
        return True

    async def _fetch(self, batch: list[Key], redis: Redis) -> list[Any] | None:
        async with redis.pipeline(transaction=False) as pipe:
            for key in batch:
                await self._read(keys=[self._histogram(key)], args=[self._config.half_life], client=pipe)
            return await pipe.execute()

    def _histogram(self, key: Key) -> str:
        return f"{self._base}:h:{key[0]}:{key[1]}"


def _member(key: Key) -> bytes:
    return f"{key[0]}:{key[1]}".encode()


def _key(member: bytes) -> Key | None:
    """A tenant is a digest, and has no colon."""
    tenant, found, tool = member.decode("utf-8", "replace").partition(":")
    return (tenant, tool) if found and len(tool) <= 128 else None


def _buckets(answer: Any) -> dict[int, float]:
    """What is no histogram gives nothing: somebody else may have written there."""
    if not isinstance(answer, list):
        return {}
    buckets: dict[int, float] = {}
    for bucket, weight in zip(answer[::2], answer[1::2], strict=False):
        try:
            number, value = int(bucket), float(weight)
        except (ValueError, TypeError):
            continue
        if math.isfinite(value) and value > 1e-9:
            buckets[number] = value
    return buckets
