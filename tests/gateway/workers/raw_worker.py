"""A worker that says byte for byte what a test tells it to, over a real socket: for workers of any kind that misbehave."""

import asyncio
import contextlib
import json

import msgspec

from gateway.workers.protocol import PROTOCOL_VERSION, Capabilities, WorkerInfo, WorkerStats
from gateway.workers.spec import WorkerSpec

DROP = "drop"
HANG = "hang"
VOCAB, CONTEXT = 100, 1000


def head(status=200, kind="application/x-ndjson", length=None):
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()


def piece(data):
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def whole(body, status=200, kind="application/json"):
    return head(status, kind, len(body)) + body


class RawWorker:
    """`kind`: turnkeep, vllm or sglang. `script`: what every POST is answered with: bytes, DROP, HANG, or a function that makes
    an endless iterator of bytes. `requests` has the bodies."""

    def __init__(self, kind, script=(), model="m", life="1"):
        self.kind, self.script, self.model, self.life = kind, list(script), model, life
        self.aborted, self.requests, self.heads, self.adapters, self.posts, self.sent = [], [], [], [], 0, 0
        self.left = asyncio.Event()
        self.page_size = 4
        self._server = None
        self._open = set()

    @property
    def spec(self):
        port = self._server.sockets[0].getsockname()[1]
        return WorkerSpec(f"http://127.0.0.1:{port}", self.kind)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(top)
                method, path = top.split(" ", 2)[:2]
                length = next((int(x.split(":")[1]) for x in top.lower().split("\r\n") if x.startswith("content-length")), 0)
                body = await reader.readexactly(length)
                if method == "GET":
                    writer.write(self._get(path))
                    await writer.drain()
                    continue
                if path in ("/v1/abort", "/abort_request"):
                    self.aborted.append(body)
                    writer.write(whole(b'{"aborted":false}'))
                    continue
                self.posts += 1
                self.requests.append(body)
                try:
                    for step in self.script:
                        if step == HANG:
                            await reader.read()
                            self.left.set()
                            return
                        if step == DROP:
                            writer.transport.abort()
                            return
                        if isinstance(step, asyncio.Event):
                            await step.wait()
                            continue
                        for data in step() if callable(step) else [step]:
                            writer.write(data)
                            self.sent += len(data)
                            await writer.drain()
                except ConnectionError:
                    self.left.set()
                    raise
        writer.close()

    def _card(self, name, parent=None):
        return {"id": name, "object": "model", "max_model_len": CONTEXT, "parent": parent}

    def _get(self, path):
        answers = {
            "/health": b'{"status":"ok"}',
            "/v1/info": msgspec.json.encode(
                WorkerInfo(
                    protocol_version=PROTOCOL_VERSION,
                    instance=self.life,
                    model=self.model,
                    namespace="00" * 16,
                    block_size=4,
                    num_blocks=100,
                    max_model_len=CONTEXT,
                    vocab_size=VOCAB,
                    max_concurrency=8,
                    capabilities=Capabilities(kv_events=False),
                )
            ),
            "/v1/stats": msgspec.json.encode(
                WorkerStats(instance=self.life, **dict.fromkeys(WorkerStats.__struct_fields__[1:14], 0))
            ),
            "/v1/models": json.dumps(
                {"data": [self._card(self.model), *(self._card(a, self.model) for a in self.adapters)]}
            ).encode(),
            "/metrics": sglang_metrics(self.life) if self.kind == "sglang" else vllm_metrics(self.life),
            "/get_model_info": b'{"model_path":"x"}',
            "/get_server_info": json.dumps(
                {"page_size": self.page_size, "max_total_num_tokens": 400, "max_running_requests": 7, "random_seed": 1}
            ).encode(),
        }
        found = answers.get(path.split("?")[0])
        return whole(found) if found is not None else whole(b"", 404)


def vllm_metrics(life="1", running=0, waiting=0, block_size=4):
    """What vLLM 0.32 prints, shortened."""
    engine = '{engine="0",model_name="m"}'
    return (
        f"# HELP vllm:num_requests_running Requests.\nprocess_start_time_seconds {life}\n"
        f"vllm:num_requests_running{engine} {running}.0\nvllm:num_requests_waiting{engine} {waiting}.0\n"
        f"vllm:kv_cache_usage_perc{engine} 0.25\n"
        f'vllm:cache_config_info{{_x="a}}b\\"",block_size="{block_size}",num_gpu_blocks="40"}} 1.0\n'
    ).encode()


def sglang_metrics(life="1", running=0, waiting=0):
    """What SGLang prints with --enable-metrics, shortened."""
    labels = '{engine_type="unified",model_name="m",tp_rank="0"}'
    return (
        f"process_start_time_seconds {life}\nsglang:num_running_reqs{labels} {running}.0\n"
        f"sglang:num_queue_reqs{labels} {waiting}.0\nsglang:token_usage{labels} 0.25\n"
    ).encode()
