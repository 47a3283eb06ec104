"""A stand-in for an OpenAI-compatible server that answers at once, for routers that are measured beside this gateway.

python -m cli.gateway_bench.backend PORT...
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson
from aiohttp import web

MODEL = "stand-in"
_ANSWER = "ok " * 16


class Backend:
    """Reads a request and answers with sixteen words, whole or as events."""

    def app(self) -> web.Application:
        """The application of one server."""
        app = web.Application(client_max_size=0)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/health_generate", "/ping"):
            app.router.add_get(path, self._ok)
        for path in ("/get_server_info", "/server_info", "/get_model_info", "/version"):
            app.router.add_get(path, self._info)
        return app

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": MODEL, "version": "0", "max_num_seqs": 256})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "nobody"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        envelope: dict[str, Any] = {"id": "chatcmpl-0", "created": 0, "model": MODEL}
        usage = {"prompt_tokens": len(body) // 5, "completion_tokens": 16, "total_tokens": len(body) // 5 + 16}
        if b'"stream":true' not in body:
            message = {"role": "assistant", "content": _ANSWER}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.Response(body=orjson.dumps(whole), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in _ANSWER.split():
            chunk = {**envelope, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word + " "}}]}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def serve(ports: list[int]) -> None:
    """Serves on all ports until it is cancelled. Port 0: a free one."""
    taken = []
    for port in ports:
        runner = web.AppRunner(Backend().app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        taken.append(runner.addresses[0][1])
    print("ready", *taken, flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(serve([int(port) for port in sys.argv[1:]]))
