"""A Redis of a gateway's own, for sessions and limits that its processes share: on a unix socket, in memory, gone with it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Self

from gateway.supervision import launch
from sessions.redis_link import RedisConfig

log = logging.getLogger(__name__)

_START_SECONDS = 10.0
_AGAIN_AFTER = 1.0
_OVERHEAD = 64 * 2**20


class PrivateRedis:
    """`async with`: it runs, and is started again when it dies; what it held is gone then, and costs time only."""

    def __init__(self, program: str, directory: Path, max_bytes: int) -> None:
        """`max_bytes`: for what is stored; the least recently used goes first."""
        self._socket = directory / "redis.sock"
        self._command = [
            *(program, "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700", "--dir", str(directory)),
            *("--save", "", "--appendonly", "no", "--maxmemory", str(max_bytes + _OVERHEAD)),
            *("--maxmemory-policy", "allkeys-lru", "--loglevel", "warning"),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def config(self) -> RedisConfig:
        """How to reach it."""
        return RedisConfig(f"unix://{self._socket}")

    async def __aenter__(self) -> Self:
        await self._start()
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _start(self) -> None:
        self._socket.unlink(missing_ok=True)
        # launch.py has the kernel end it when this process is killed.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "-", *self._command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not self._socket.exists() and self._process.returncode is None:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("the redis-server for the sessions of this gateway's processes is slow to start")

    async def _keep(self) -> None:
        while self._process is not None:
            status = await self._process.wait()
            log.warning("the redis-server for the sessions of this gateway's processes ended (%d); it is started again", status)
            await asyncio.sleep(_AGAIN_AFTER)
            await self._start()
