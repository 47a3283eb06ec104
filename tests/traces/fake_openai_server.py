"""An OpenAI-shaped server with known latencies: tokens are bytes of the conversation, the cache is unlimited."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web

from traces.unlimited_cache import UnlimitedCache


def tokens_of(body):
    """One token a byte; a prompt grows at its end only, as real ones do."""
    tools = json.dumps(body.get("tools", []), sort_keys=True)
    return list((tools + "".join(json.dumps(message, sort_keys=True) for message in body["messages"])).encode())


@dataclass
class FakeServer:
    """`answer(body)` gives (content pieces, tool calls) or raises web.HTTPException; the default is `max_tokens` letters."""

    first: float = 0.0
    between: float = 0.0
    reports_cached: bool = True
    can_tokenize: bool = True
    keeps_answers: bool = False
    answer: object = None
    break_stream: str | None = None
    models: tuple = ("fake",)
    bodies: list = field(default_factory=list)
    sessions: list = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    three_running: asyncio.Event = field(default_factory=asyncio.Event)
    cache: UnlimitedCache = field(default_factory=UnlimitedCache)

    def app(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request):
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _tokenize(self, request):
        if not self.can_tokenize:
            return web.json_response({"error": {"message": "no such endpoint"}}, status=404)
        tokens = tokens_of(await request.json())
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("X-Session-ID"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == 3:
            self.three_running.set()
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request, body):
        pieces, calls = ["x"] * body.get("max_tokens", 4), []
        if self.answer is not None:
            pieces, calls = self.answer(body)
        tokens = tokens_of(body)
        cached = self.cache.add(tokens)
        if self.keeps_answers:
            answer = {"role": "assistant", "content": "".join(pieces)}
            self.cache.add(tokens_of({**body, "messages": [*body["messages"], answer]}))
        headers = {"Content-Type": "text/event-stream", "X-Turnkeep-Replica": "fake-0"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)

        async def send(event):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def choice(delta, finish=None):
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        await send(choice({"role": "assistant", "content": ""}))
        await response.write(b": ping\n\n")
        await asyncio.sleep(self.first)
        if self.break_stream == "error":
            await send({"error": {"message": "the worker died"}})
            return response
        if self.break_stream == "garbage":
            await response.write(b"data: {broken\n\n")
            return response
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(self.between)
            await send(choice({"content": piece}))
        for index, (name, arguments) in enumerate(calls):
            head = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
            await send(choice({"tool_calls": [head]}))
            for part in (arguments[:3], arguments[3:]):
                await send(choice({"tool_calls": [{"index": index, "function": {"arguments": part}}]}))
        if self.break_stream == "cut":
            return response
        await send(choice({}, "tool_calls" if calls else "length"))
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(pieces) + 5 * len(calls)}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response
