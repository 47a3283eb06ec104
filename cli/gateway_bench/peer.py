"""The bare proxy and its worker as processes of their own, for as long as a run takes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from cli.gateway_bench.backend import MODEL
from cli.gateway_bench.sides import Side
from gateway.supervision import launch

_START_SECONDS = 30.0


class PeerError(Exception):
    """A process that a gateway is measured against did not start."""


@asynccontextmanager
async def bare_proxy() -> AsyncGenerator[Side, None]:
    """The side that the least of all proxies is. Raises PeerError."""
    async with AsyncExitStack() as stack:
        _, worker = await stack.enter_async_context(_child("backend", "0"))
        pid, port = await stack.enter_async_context(_child("bare", "0", f"http://127.0.0.1:{worker}"))
        yield Side("bare proxy", f"http://127.0.0.1:{port}", pid, model=MODEL)


@asynccontextmanager
async def _child(module: str, *arguments: str) -> AsyncGenerator[tuple[int, int], None]:
    """A process and the port it serves. The kernel ends it with this one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "-"),
        *(sys.executable, "-P", "-m", f"cli.gateway_bench.{module}", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if process.stdout is None:
            raise RuntimeError("the process was started without a pipe")
        try:
            async with asyncio.timeout(_START_SECONDS):
                words = (await process.stdout.readline()).split()
        except TimeoutError as error:
            raise PeerError(f"{module}, which the gateway is measured against, did not start.") from error
        if len(words) != 2:
            raise PeerError(f"{module}, which the gateway is measured against, ended before it served.")
        yield process.pid, int(words[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
