"""Child spans of a turn at the replica, sent over OTLP/HTTP. Without a URL nothing of this is imported.

`engine.generate` covers a request from its arrival to its end; below it stand `queue`, `prefill` and `decode`, as far as the
request came. They are recorded when it has ended, with the times the engine measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.server.metrics import outcome_of
from engine.server.stream import RequestStream
from gateway.workers.protocol import Chunk, Done, Failed, WorkerInfo

SERVICE_NAME = "turnkeep-engine"

_EXPORT_TIMEOUT = 5.0
_MAX_QUEUED_SPANS = 4096


def traces_endpoint(url: str) -> str:
    """Where spans go: `url` of an OTLP/HTTP collector; /v1/traces is added when it has no path, as the gateway does."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1/traces"


class RequestTracing:
    """An observer of an `EngineThread` that turns each request into spans."""

    def __init__(self, otlp_url: str, info: WorkerInfo) -> None:
        resource = Resource.create({"service.name": SERVICE_NAME, "service.instance.id": info.instance})
        exporter = OTLPSpanExporter(endpoint=traces_endpoint(otlp_url), timeout=_EXPORT_TIMEOUT)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("turnkeep.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._model = info.model

    def step_ended(self, seconds: float) -> None:
        pass

    def chunk_arrived(self, stream: RequestStream, chunk: Chunk, at: float) -> None:
        pass

    def request_ended(self, stream: RequestStream, at: float) -> None:
        wall_offset = time.time_ns() - int(time.monotonic() * 1e9)
        phases = _phases(stream, at)

        def wall(moment: float) -> int:
            return wall_offset + int(moment * 1e9)

        root = self._tracer.start_span(
            "engine.generate",
            context=self._propagator.extract(dict(stream.trace_headers)),
            kind=SpanKind.SERVER,
            attributes=self._attributes(stream),
            start_time=wall(stream.arrived),
        )
        if isinstance(stream.end, Failed):
            root.set_attribute("error.type", stream.end.code)
            root.set_status(Status(StatusCode.ERROR, stream.end.message))
        below = set_span_in_context(root)
        for name, (begin, end) in phases.items():
            self._tracer.start_span(name, context=below, start_time=wall(begin)).end(wall(end))
        root.end(wall(at))

    def close(self) -> None:
        """Sends what is left; takes at most about the export timeout. Blocks: not for the event loop."""
        self._provider.shutdown()

    def _attributes(self, stream: RequestStream) -> Mapping[str, str | int | tuple[str, ...]]:
        attributes: dict[str, str | int | tuple[str, ...]] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": stream.choices,
            "gen_ai.usage.output_tokens": stream.completion_tokens,
            "gen_ai.response.finish_reasons": tuple(finished.finish_reason for _, finished in sorted(stream.finished.items())),
            "turnkeep.request_id": stream.request_id,
            "turnkeep.outcome": outcome_of(stream),
        }
        if stream.session is not None:
            attributes["gen_ai.conversation.id"] = stream.session
        if stream.started is not None:
            attributes["gen_ai.usage.input_tokens"] = stream.started.prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = stream.started.cached_tokens
        if isinstance(stream.end, Done):
            attributes["turnkeep.preemptions"] = stream.end.preemptions
            attributes["turnkeep.decode_passes"] = stream.end.decode_passes
            attributes["turnkeep.drafted_tokens"] = stream.end.drafted_tokens
            attributes["turnkeep.accepted_tokens"] = stream.end.accepted_tokens
            attributes["turnkeep.forced_tokens"] = stream.end.forced_tokens
        return attributes


def _phases(stream: RequestStream, at: float) -> dict[str, tuple[float, float]]:
    """Name -> begin and end on the monotonic clock, of the phases a request went through."""
    arrived = stream.arrived
    if isinstance(stream.end, Done) and stream.started is not None and stream.first_token_at is not None:
        # The engine's own durations, counted back from the end; the time it took to check the request stands before the queue.
        decode = max(at - stream.end.decode_seconds, arrived)
        prefill = max(decode - stream.end.prefill_seconds, arrived)
        return {"queue": (arrived, prefill), "prefill": (prefill, decode), "decode": (decode, at)}
    if stream.started is None:
        return {"queue": (arrived, at)}
    started = min(arrived + stream.started.queue_seconds, at)
    if stream.first_token_at is None:
        return {"queue": (arrived, started), "prefill": (started, at)}
    first = max(stream.first_token_at, started)
    return {"queue": (arrived, started), "prefill": (started, first), "decode": (first, at)}
