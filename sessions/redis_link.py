"""A connection to Redis that never holds up a turn: every call has a time budget, and while the server is gone none is tried.

One line in the log says that it is gone, one that it is back, however many calls there are in between; and of a server that
comes and goes there is one such pair a minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from sessions.loop_budget import LoopBudget

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUIET_SECONDS = 60.0
_PROBE_SECONDS = 1.0
_POOL = 32


def is_wrong_type(error: object) -> bool:
    """Whether an answer says that one key is of another type: nothing that other keys need suffer for."""
    return isinstance(error, Exception) and "WRONGTYPE" in str(error)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """`url`: redis://, rediss:// or unix://. `budget`, `write_budget`: seconds a turn waits for an answer before it goes on
    without. `retry_interval`: seconds between looks at a server that is gone. `max_timeouts`: in a row, after which a slow
    server counts as gone. `ttl`: seconds after its last turn for which a session is kept there. `max_entry_bytes`: larger
    sessions are not. `prefix`: of all keys."""

    url: str = field(repr=False)
    budget: float = 0.01
    write_budget: float = 0.05
    retry_interval: float = 0.5
    max_timeouts: int = 5
    ttl: float = 86_400.0
    max_entry_bytes: int = 16 * 2**20
    prefix: str = "turnkeep"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or parts.port > 0)
        except ValueError:
            known = False
        if not known:
            # What stands there may hold a password, so it is not repeated.
            raise ValueError("the Redis address (--redis) must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH")
        for name in ("budget", "write_budget", "retry_interval", "ttl"):
            if not getattr(self, name) > 0:
                raise ValueError(f"redis.{name} must be positive, not {getattr(self, name)}")
        for name in ("max_timeouts", "max_entry_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"redis.{name} must be at least 1, not {getattr(self, name)}")

    @property
    def shown(self) -> str:
        """The address without what must not be logged."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{host}{port}{parts.path}"


class RedisLink:
    """One server. Use on one event loop. `calls` counts (operation, result): ok, timeout, error, skipped."""

    def __init__(self, config: RedisConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects when it is first used. Raises ValueError for a URL that redis-py does not take."""
        # Forty milliseconds and four megabytes that gateways without Redis need not pay.
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self.config = config
        self.calls: Counter[tuple[str, str]] = Counter()
        # asyncio's TimeoutError is an OSError.
        self._errors: tuple[type[Exception], ...] = (RedisError, OSError)
        # One retry: a connection that the server closed while it was idle says nothing about the server.
        pool = BlockingConnectionPool.from_url(
            config.url,
            max_connections=_POOL,
            # Every call has its budget. Limits of the client's own would count what this process is late by, and would take
            # a turn that waits for one of its connections for a server that is gone.
            timeout=None,
            socket_connect_timeout=None,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 1),
            health_check_interval=0,
        )
        self._client: Redis = Redis(connection_pool=pool)
        self._up = True
        self._timeouts = 0
        self._slots = asyncio.Semaphore(_POOL)
        self._clock = clock
        self._why = ""
        self._times = 0
        self._announced = False
        self._quiet_until = float("-inf")
        self._probing: asyncio.Task[None] | None = None
        self._back: list[Callable[[], None]] = []

    @property
    def up(self) -> bool:
        """Whether calls are tried."""
        return self._up

    @property
    def client(self) -> Redis:
        """For making scripts; calls go through `call`."""
        return self._client

    def when_back(self, callback: Callable[[], None]) -> None:
        """`callback` is called on the loop whenever the server is there again after it was gone."""
        self._back.append(callback)

    async def call(
        self,
        operation: str,
        run: Callable[[Redis], Awaitable[T]],
        missing: T,
        *,
        budget: float | None = None,
        wrong_type: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """What `run` gives, or `missing` when the server is slow or gone. Never raises for what the server does. `wrong_type`
        is awaited first when the key is of a type that `run` has no use for: that says nothing about the server."""
        if not self._up:
            self.calls[operation, "skipped"] += 1
            return missing
        try:
            # A turn that waits for one of our own connections cannot blame the server; once that is gone nobody waits.
            async with self._slots:
                if not self._up:
                    self.calls[operation, "skipped"] += 1
                    return missing
                async with LoopBudget(self.config.budget if budget is None else budget):
                    answer = await run(self._client)
        except TimeoutError:
            self.calls[operation, "timeout"] += 1
            self._timeouts += 1
            if self._timeouts >= self.config.max_timeouts:
                self._gone(f"{self._timeouts} calls in a row took too long")
            return missing
        except self._errors as error:
            self._failed(operation, error)
            if wrong_type is not None and is_wrong_type(error):
                await wrong_type()
            return missing
        self._timeouts = 0
        self.calls[operation, "ok"] += 1
        return answer

    def _failed(self, operation: str, error: Exception) -> None:
        from redis.exceptions import ConnectionError as Lost
        from redis.exceptions import TimeoutError as Slow

        self.calls[operation, "error"] += 1
        if isinstance(error, Lost | Slow | OSError):
            self._gone(str(error) or type(error).__name__)
            return
        if is_wrong_type(error):
            self._timeouts = 0
            return
        # It answers, and says no: out of memory, read-only. That is not cured by waiting.
        self._timeouts += 1
        if self._timeouts >= self.config.max_timeouts:
            self._gone(f"it refuses: {error}")

    def _gone(self, why: str) -> None:
        if not self._up:
            return
        self._up = False
        self._why = " ".join(why.split())[:200]
        self._times += 1
        self._announce()
        if self._probing is None:
            self._probing = asyncio.ensure_future(self._probe())

    def _announce(self) -> None:
        """Says that it is gone; within a minute of the last such line later, if it still is."""
        if self._announced or self._clock() < self._quiet_until:
            return
        before = f"; {self._times - 1} more times since this was last said" if self._times > 1 else ""
        log.warning(
            "Redis at %s cannot be used (%s%s); this gateway goes on with its own copy of sessions until it can",
            self.config.shown,
            self._why,
            before,
        )
        self._announced, self._times = True, 0
        self._quiet_until = self._clock() + _QUIET_SECONDS

    async def _probe(self) -> None:
        key = f"{self.config.prefix}:probe"
        while not self._up:
            await asyncio.sleep(self.config.retry_interval)
            try:
                async with LoopBudget(_PROBE_SECONDS):
                    # A write: a server that is full or read-only is of no use either.
                    await self._client.set(key, b"1", px=60_000)
            except self._errors as error:
                log.debug("Redis at %s: %s", self.config.shown, error)
                self._announce()
                continue
            self._up = True
            self._timeouts = 0
            if self._announced:
                self._announced = False
                log.info("Redis at %s can be used again", self.config.shown)
        self._probing = None
        for callback in self._back:
            callback()

    async def aclose(self) -> None:
        """Drops the connections; idempotent."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
            self._probing = None
        await self._client.aclose()
        pool: Any = self._client.connection_pool
        await pool.disconnect()
