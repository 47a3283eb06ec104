"""The least that a proxy for turns can do, as a limit to measure against: it reads a body, parses it, passes it on, and returns
the answer. No sessions, no routing, no metrics.

python -m cli.gateway_bench.bare PORT WORKER_URL
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

import aiohttp
import orjson
from aiohttp import web


class BareProxy:
    """In front of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def app(self) -> web.Application:
        """Its application, with a client of its own."""
        app = web.Application(client_max_size=0)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.cleanup_ctx.append(self._with_client)
        return app

    async def _with_client(self, app: web.Application) -> AsyncGenerator[None, None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as self._client:
            yield

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        orjson.loads(body)
        headers = {"Content-Type": "application/json"}
        async with self._client.post(f"{self._worker}/v1/chat/completions", data=body, headers=headers) as answer:
            if answer.content_type != "text/event-stream":
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def serve(port: int, worker: str) -> None:
    """Serves until it is cancelled. Port 0: a free one."""
    runner = web.AppRunner(BareProxy(worker).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
