"""A fake OpenAI-shaped server on a free port, in the test's loop or on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import web


@pytest.fixture
async def serve():
    """`await serve(fake)` gives the URL of a running FakeServer."""
    runners = []

    async def start(fake):
        runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def serve_on_thread():
    """The same for tests of commands, which have a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners = []

    def start(fake):
        async def run():
            runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(run(), loop).result(20)

    yield start
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()
