"""A gateway on a free port in front of a scripted dispatcher, and a client for it."""

import contextlib
from dataclasses import dataclass

import aiohttp
import orjson
from fake_dispatcher import FakeDispatcher, FakeObserver

from gateway.access.config import AuthConfig
from gateway.admission.gate import make_gate
from gateway.app import make_apps
from gateway.config import GatewayConfig, HttpConfig, ModelConfig, SessionsConfig
from gateway.models import ModelRegistry, ServedModel
from gateway.pipeline import Pipeline
from gateway.server import HttpServer
from gateway.telemetry.telemetry import Telemetry
from gateway.turns.config import TurnsConfig
from gateway.watching.config import MissesConfig


@dataclass
class Gateway:
    url: str
    http: aiohttp.ClientSession
    dispatcher: FakeDispatcher
    observer: FakeObserver
    telemetry: Telemetry
    pipeline: Pipeline
    server: HttpServer

    @contextlib.asynccontextmanager
    async def post(self, path, body, **kwargs):
        data = body if isinstance(body, bytes | bytearray) else orjson.dumps(body)
        async with self.http.post(self.url + path, data=data, **kwargs) as response:
            yield response

    async def json(self, path, body, *, status=200, **kwargs):
        async with self.post(path, body, **kwargs) as response:
            answer = orjson.loads(await response.read())
            assert response.status == status, answer
            return answer

    async def chat(self, status=200, headers=None, **body):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.json("/v1/chat/completions", body, status=status, headers=headers)

    async def events(self, path, body, **kwargs):
        """The events of a stream: parsed data, `"[DONE]"`, and comments as they are."""
        async with self.post(path, {**body, "stream": True}, **kwargs) as response:
            raw = (await response.read()).decode()
            assert response.status == 200, raw
            assert response.content_type == "text/event-stream"
        frames = [frame for frame in raw.split("\n\n") if frame]
        events = []
        for frame in frames:
            if frame.startswith("data: "):
                data = frame.removeprefix("data: ")
                events.append(data if data == "[DONE]" else orjson.loads(data))
            else:
                assert frame.startswith(":"), frame
                events.append(frame)
        return events

    async def chat_events(self, **body):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.events("/v1/chat/completions", body)


@contextlib.asynccontextmanager
async def run_gateway(
    directory,
    *,
    api_keys=(),
    auth=None,
    aliases=(),
    max_model_len=2048,
    reasons=tuple,
    ledger=True,
    turns=None,
    misses=None,
    tool_format=None,
    **http,
):
    auth = auth or {}
    sessions = {name: http.pop(name) for name in ("max_bytes",) if name in http}
    config = GatewayConfig(
        models=(ModelConfig("tiny", directory, aliases, tool_format=tool_format),),
        http=HttpConfig(port=0, **http),
        auth=AuthConfig(keys=tuple(api_keys), **auth),
        turns=turns or TurnsConfig(),
        misses=misses or MissesConfig(),
        sessions=SessionsConfig(ledger=ledger, **sessions),
    )
    dispatcher = FakeDispatcher(directory, max_model_len=max_model_len)
    observer = FakeObserver()
    telemetry = Telemetry()
    registry = ModelRegistry(ServedModel.load(model) for model in config.models)
    pipeline = Pipeline(config, registry, dispatcher, telemetry, [observer])
    gate = make_gate(config, telemetry)
    app = make_apps(config, pipeline, reasons=reasons, gate=gate).public
    async with HttpServer(app, config.http) as server:
        async with aiohttp.ClientSession() as http_session:
            yield Gateway(server.url, http_session, dispatcher, observer, telemetry, pipeline, server)
    assert dispatcher.open == 0, "a generation was not closed"
    assert gate.admission.in_flight == 0, "a ticket was not given back"
    assert gate.admission.queued_tokens() == 0
