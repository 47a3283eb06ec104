import asyncio
import gzip
import logging
import subprocess
import sys

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from gateway.telemetry.config import TelemetryConfig
from gateway.telemetry.context import trace_context
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Receipt, SessionRef, Turn, TurnError
from gateway.workers.protocol import SamplingParams
from sessions.explain.misses import Miss

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """A real OTLP/HTTP receiver on a free port."""

    def __init__(self):
        self.spans = []
        self.resources = []
        self.headers = []
        self.came = asyncio.Event()
        self.delay = 0.0
        self.status = 200

    async def start(self, port=0):
        app = web.Application()
        app.router.add_post("/v1/traces", self._traces)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        await self.runner.cleanup()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _traces(self, request):
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        await asyncio.sleep(self.delay)
        if self.status == 200:
            message = ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                self.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
            self.headers.append(dict(request.headers))
            self.came.set()
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            status=self.status,
            content_type="application/x-protobuf",
        )


def attributes(thing):
    values = {}
    for item in thing.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return values


def turn(**fields):
    settings = {
        "request_id": "req-1",
        "model": "smollm2-135m",
        "session": SessionRef("tenant", "session-1", "x-session-id", "session-0", "job-7", ("body.session_id",), final=True),
        "messages": ({"role": "user", "content": "a secret"},),
        "stream": True,
        "sampling": SamplingParams(max_tokens=50, temperature=0.5, seed=7, n=2, stop=("END",)),
    }
    return Turn(**(settings | fields))


@pytest.fixture
async def collector():
    collector = await Collector().start()
    yield collector
    await collector.stop()


def config(collector, **fields):
    return TelemetryConfig(otlp_url=collector.url, export_interval=0.05, **fields)


def answer(span):
    span.dispatched(Receipt("replica-1", "prefix", 96, 2))
    span.first_token()
    span.first_token()
    span.finished(
        response_id="req-1",
        response_model="smollm2-135m",
        finish_reasons=["stop", "length"],
        prompt_tokens=120,
        cached_tokens=96,
        completion_tokens=30,
    )


async def test_a_turn_becomes_a_span_below_its_caller(collector):
    telemetry = Telemetry(config(collector, service_version="1.2", otlp_headers={"x-key": "k"}))
    span = telemetry.start_turn("chat", turn(), {"Traceparent": TRACEPARENT, "tracestate": "vendor=1"})
    headers = span.trace_headers()
    answer(span)
    span.failed(RuntimeError("late news change nothing"))
    await telemetry.aclose()
    (got,) = collector.spans
    assert got.name == "chat smollm2-135m"
    assert got.trace_id.hex() == TRACE
    assert got.parent_span_id.hex() == PARENT
    assert got.kind == got.SPAN_KIND_SERVER
    assert headers == {"traceparent": f"00-{TRACE}-{got.span_id.hex()}-01", "tracestate": "vendor=1"}
    values = attributes(got)
    first = values.pop("gen_ai.response.time_to_first_chunk")
    assert 0 <= first < 5
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "turnkeep",
        "gen_ai.conversation.id": "session-1",
        "gen_ai.request.model": "smollm2-135m",
        "gen_ai.request.stream": True,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ["END"],
        "gen_ai.response.id": "req-1",
        "gen_ai.response.model": "smollm2-135m",
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 96,
        "turnkeep.request.id": "req-1",
        "turnkeep.session.source": "x-session-id",
        "turnkeep.session.parent": "session-0",
        "turnkeep.session.correlation": "job-7",
        "turnkeep.session.conflicts": ["body.session_id"],
        "turnkeep.session.final": True,
        "turnkeep.replica": "replica-1",
        "turnkeep.route.reason": "prefix",
        "turnkeep.route.matched_tokens": 96,
        "turnkeep.route.candidates": 2,
        "turnkeep.route.estimated_seconds": 0.0,
    }
    assert "secret" not in str(got)
    assert [event.name for event in got.events] == ["turnkeep.dispatched", "gen_ai.first_token"]
    assert collector.resources == [{"service.name": "turnkeep-gateway", "service.version": "1.2"}]
    assert collector.headers[0]["x-key"] == "k"
    assert b'turnkeep_gateway_spans_total{result="exported"} 1.0' in telemetry.render_metrics()


async def test_a_miss_and_a_turn_that_was_shared_are_part_of_the_span(collector):
    telemetry = Telemetry(config(collector))
    span = telemetry.start_turn("chat", turn(), {})
    span.attached("running", "req-0")
    span.dispatched(Receipt("replica-1", "prefix", 96, 2), counted=False)
    miss = Miss(
        request_id="req-1",
        at=1.0,
        cause="timestamp",
        path="messages[0].content",
        message=0,
        field_bytes=41,
        text_bytes=60,
        tokens=17,
        lost_tokens=3000,
        lost_seconds=1.5,
        before="a secret",
        after="another secret",
    )
    span.missed(miss)
    counts = {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 1}
    span.finished(response_id="r", response_model="m", finish_reasons=["stop"], counted=False, **counts)
    span.missed(miss)  # it has ended
    await telemetry.aclose()
    (got,) = collector.spans
    values = attributes(got)
    assert {name: value for name, value in values.items() if "miss" in name or "turn." in name} == {
        "turnkeep.miss.cause": "timestamp",
        "turnkeep.miss.path": "messages[0].content",
        "turnkeep.miss.field_bytes": 41,
        "turnkeep.miss.text_bytes": 60,
        "turnkeep.miss.shared_tokens": 17,
        "turnkeep.miss.lost_tokens": 3000,
        "turnkeep.miss.lost_seconds": 1.5,
        "turnkeep.turn.attached": "running",
        "turnkeep.turn.first_request": "req-0",
    }
    assert "secret" not in str(got)
    text = telemetry.render_metrics().decode()
    assert 'turnkeep_gateway_turns_attached_total{result="running"} 1.0' in text
    assert "turnkeep_gateway_routes_total{" not in text
    assert "turnkeep_gateway_prompt_tokens_total{" not in text


async def test_without_a_caller_it_is_a_trace_of_its_own(collector):
    telemetry = Telemetry(config(collector))
    span = telemetry.start_turn("text_completion", turn(session=SessionRef("", None), sampling=SamplingParams()), {})
    assert set(span.trace_headers()) == {"traceparent"}
    answer(span)
    await telemetry.aclose()
    (got,) = collector.spans
    assert got.parent_span_id == b""
    assert got.name == "text_completion smollm2-135m"
    assert "gen_ai.conversation.id" not in attributes(got)
    assert "gen_ai.request.seed" not in attributes(got)


async def test_the_older_names_are_a_setting(collector):
    telemetry = Telemetry(config(collector, semconv="legacy"))
    answer(telemetry.start_turn("chat", turn(), {}))
    await telemetry.aclose()
    values = attributes(collector.spans[0])
    assert values["gen_ai.system"] == "turnkeep"
    assert "gen_ai.provider.name" not in values
    assert values["gen_ai.usage.input_tokens"] == 120


@pytest.mark.parametrize(
    ("error", "kind", "status", "is_error"),
    [
        (TurnError(503, "no_worker", "None is up."), "no_worker", 503, True),
        (TurnError(400, "invalid_sampling", "No."), "invalid_sampling", 400, False),
        (asyncio.CancelledError(), "client_disconnected", 499, False),
        (ValueError("x"), "ValueError", 500, True),
    ],
)
async def test_turns_that_fail(collector, error, kind, status, is_error):
    telemetry = Telemetry(config(collector))
    telemetry.start_turn("chat", turn(), {}).failed(error)
    await telemetry.aclose()
    (got,) = collector.spans
    assert attributes(got)["error.type"] == kind
    assert attributes(got)["http.response.status_code"] == status
    assert (got.status.code == got.status.STATUS_CODE_ERROR) is is_error
    line = f'turns_total{{model="smollm2-135m",operation="chat",status="{status}"}} 1.0'
    assert line.encode() in telemetry.render_metrics()


async def test_a_caller_that_does_not_sample_is_obeyed(collector):
    telemetry = Telemetry(config(collector))
    span = telemetry.start_turn("chat", turn(), {"traceparent": TRACEPARENT[:-1] + "0"})
    assert span.trace_headers()["traceparent"].startswith(f"00-{TRACE}-")
    assert span.trace_headers()["traceparent"].endswith("-00")
    answer(span)
    await telemetry.aclose()
    assert collector.spans == []


async def test_a_dead_collector_costs_one_line_and_no_time(caplog):
    caplog.set_level(logging.INFO)
    collector = await Collector().start()
    port = collector.port
    await collector.stop()
    telemetry = Telemetry(config(collector, queue_size=64, export_timeout=0.3))
    loop = asyncio.get_running_loop()
    slowest = 0.0
    for _ in range(500):
        began = loop.time()
        answer(telemetry.start_turn("chat", turn(), {}))
        slowest = max(slowest, loop.time() - began)
        await asyncio.sleep(0.001)
    assert slowest < 1.0
    async with asyncio.timeout(10):
        while b'spans_total{result="failed"}' not in telemetry.render_metrics():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"spans cannot be delivered to http://127.0.0.1:{port}/v1/traces; they are dropped until it answers again"
    ]
    # It comes back, and so do the spans.
    collector = await Collector().start(port)
    async with asyncio.timeout(10):
        while not collector.spans:
            answer(telemetry.start_turn("chat", turn(), {}))
            await asyncio.sleep(0.05)
    assert any("again" in record.message and record.levelno == logging.INFO for record in caplog.records)
    await telemetry.aclose()
    await collector.stop()


async def test_a_collector_that_hangs_does_not_hold_up_the_end(collector):
    collector.delay = 30.0
    telemetry = Telemetry(config(collector, export_timeout=0.3))
    answer(telemetry.start_turn("chat", turn(), {}))
    began = asyncio.get_running_loop().time()
    await telemetry.aclose()
    assert asyncio.get_running_loop().time() - began < 2


def test_without_a_collector_the_sdk_is_not_imported():
    code = (
        "import sys; from gateway.telemetry.telemetry import Telemetry; Telemetry();"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')], 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_without_a_collector_the_callers_context_is_passed_on():
    telemetry = Telemetry()
    span = telemetry.start_turn("chat", turn(), {"TraceParent": TRACEPARENT, "tracestate": "a=b", "x": "y"})
    assert span.trace_headers() == {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    answer(span)
    assert telemetry.start_turn("chat", turn(), {"traceparent": "nonsense"}).trace_headers() == {}
    await telemetry.aclose()


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        TRACEPARENT[:-1],
        TRACEPARENT.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        TRACEPARENT + "\r\nx: y",
        TRACEPARENT + "-" + "x" * 300,
    ],
)
def test_malformed_contexts_are_dropped(value):
    assert trace_context({"traceparent": value, "tracestate": "a=b"}) == {}


def test_odd_tracestates_are_dropped():
    assert trace_context({"traceparent": TRACEPARENT, "tracestate": "x" * 513}) == {"traceparent": TRACEPARENT}
    assert trace_context({"traceparent": TRACEPARENT, "tracestate": "a=\u00e9"}) == {"traceparent": TRACEPARENT}
    assert trace_context({"traceparent": f" {TRACEPARENT} ", "tracestate": ""}) == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize(
    ("url", "traces"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
    ],
)
def test_the_address_of_the_collector(url, traces):
    assert TelemetryConfig(otlp_url=url).traces_url == traces
    assert TelemetryConfig().traces_url is None


@pytest.mark.parametrize("wrong", [{"otlp_url": "h:4318"}, {"otlp_url": "ftp://x"}, {"semconv": "new"}, {"queue_size": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError):
        TelemetryConfig(**wrong)
