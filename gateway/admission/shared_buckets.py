"""Token buckets that several gateways share through Redis. What happens to a bucket happens there in one step, by the server's
clock; while the server is slow or gone each gateway goes on with its own copy, as it last saw it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from gateway.admission.buckets import Buckets, Taken
from sessions.redis_link import RedisLink

_MAX_SEEN = 100_000
# A server whose clock was set back by more than this, or another one, is believed.
_CLOCK_STEP = 5.0

_TAKE = """
-- KEYS: bucket; ARGV: cost, per minute, mode (take | give). Gives level, seconds to wait, time
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local cost, size = tonumber(ARGV[1]), tonumber(ARGV[2])
if redis.call('TYPE', KEYS[1])['ok'] ~= 'hash' then redis.call('DEL', KEYS[1]) end
local state = redis.call('HMGET', KEYS[1], 'l', 't')
local level, at = tonumber(state[1] or ''), tonumber(state[2] or '')
if level and at then level = math.min(size, level + math.max(0, now - at) * size / 60) else level = size end
local wait = 0
if ARGV[3] == 'give' then
  level = math.min(size, level + cost)
else
  local missing = math.min(cost, size) - level
  if missing > 1e-9 then wait = missing * 60 / size else level = level - cost end
end
redis.call('HSET', KEYS[1], 'l', string.format('%.6f', level), 't', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * (60 + 60 * (size - level) / size)))
return {string.format('%.6f', level), string.format('%.6f', wait), string.format('%.6f', now)}
"""
"""A key that expires is full by then, so nothing is lost with it."""


class SharedBuckets:
    """Buckets by name, in Redis and here."""

    def __init__(self, link: RedisLink, local: Buckets) -> None:
        self._link = link
        self._local = local
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._script = link.client.register_script(_TAKE)

    async def take(self, name: str, cost: float, per_minute: float) -> Taken:
        """As `Buckets.take`."""
        found = await self._run(name, cost, per_minute, "take")
        if found is None:
            return self._local.take(name, cost, per_minute)
        return found

    async def give(self, name: str, amount: float, per_minute: float) -> None:
        """As `Buckets.give`."""
        found = await self._run(name, amount, per_minute, "give")
        if found is None:
            self._local.give(name, amount, per_minute)

    async def _run(self, name: str, cost: float, per_minute: float, mode: str) -> Taken | None:
        key = f"{self._link.config.prefix}:limit:1:{name}"

        async def run(client: Any) -> Any:
            return await self._script(keys=[key], args=[repr(float(cost)), repr(float(per_minute)), mode], client=client)

        answer = await self._link.call("limit", run, None)
        try:
            level, wait, at = map(float, answer) if answer is not None else (None, 0.0, 0.0)
        except (ValueError, TypeError):
            return None
        if level is None:
            return None
        # Answers come out of order where several calls are under way: what is older than what was seen is no news.
        seen = self._seen.pop(name, 0.0)
        if not 0 < seen - at < _CLOCK_STEP:
            self._local.put(name, level)
            seen = at
        self._seen[name] = seen
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return Taken(level, wait)
