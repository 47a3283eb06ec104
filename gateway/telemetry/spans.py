"""Spans over OTLP/HTTP. The one file that imports the OpenTelemetry SDK; imported only when a collector is configured."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry.config import TelemetryConfig
from gateway.telemetry.names import AttributeValue, rename

log = logging.getLogger(__name__)

_MAX_BATCH = 512
# The libraries' own complaints, one for every attempt; `_QuietExporter` says it once.
_NOISY = ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http", "opentelemetry.sdk._shared_internal")


class Tracing:
    """Makes spans and ships them from a thread of its own. A collector that is slow or gone costs the turns nothing.

    `count(result, n)` is told how many spans were `exported` or `failed`; it is called on that thread.
    """

    def __init__(self, config: TelemetryConfig, count: Callable[[str, int], None]) -> None:
        self._legacy = config.semconv == "legacy"
        self._timeout = config.export_timeout
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        url = config.traces_url or ""
        self._exporter = _QuietExporter(
            OTLPSpanExporter(endpoint=url, headers=dict(config.otlp_headers), timeout=config.export_timeout), url, count
        )
        resource = {"service.name": config.service_name, "service.version": config.service_version}
        # Everything is given: what is left out here would be read from the environment.
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({name: value for name, value in resource.items() if value}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=config.queue_size,
                schedule_delay_millis=config.export_interval * 1000,
                max_export_batch_size=min(_MAX_BATCH, config.queue_size),
                export_timeout_millis=config.export_timeout * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("turnkeep.gateway", config.service_version or None)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, AttributeValue]) -> OpenSpan:
        """Begins a span below the caller's (`carrier`: traceparent and tracestate), or a trace of its own."""
        parent = self._propagator.extract(dict(carrier), Context())
        span = self._tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, attributes=rename(attributes, legacy=self._legacy)
        )
        return OpenSpan(span, self._propagator, legacy=self._legacy)

    async def aclose(self) -> None:
        """Sends what is queued, for `export_timeout` seconds at most."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        # A daemon: a collector that takes its time must not hold up the end of the process.
        threading.Thread(target=shut_down, name="otlp-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout):
                await done.wait()
        except TimeoutError:
            self._exporter.shutdown()
            log.warning("the OTLP collector took longer than %g s; the last spans are lost", self._timeout)


class OpenSpan:
    """One span that has begun. Attribute names are current ones; they are renamed on the way."""

    def __init__(self, span: Span, propagator: TraceContextTextMapPropagator, *, legacy: bool) -> None:
        self._span = span
        self._propagator = propagator
        self._legacy = legacy

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(rename(attributes, legacy=self._legacy))

    def event(self, name: str, attributes: Mapping[str, AttributeValue], at: float | None = None) -> None:
        """`at`: seconds on the wall clock; None: now."""
        timestamp = None if at is None else int(at * 1e9)
        self._span.add_event(name, rename(attributes, legacy=self._legacy), timestamp)

    def end(self, failure: str | None = None) -> None:
        """`failure`: a sentence that marks the span as failed."""
        if failure is not None:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class _QuietExporter(SpanExporter):
    """Says once that the collector is gone, and once that it is back."""

    def __init__(self, inner: SpanExporter, url: str, count: Callable[[str, int], None]) -> None:
        self._inner = inner
        self._url = url
        self._count = count
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises, turns must not notice
            result = SpanExportResult.FAILURE
            log.debug("OTLP export to %s: %s", self._url, error)
        failed = result is not SpanExportResult.SUCCESS
        self._count("failed" if failed else "exported", len(spans))
        if failed and not self._failing:
            log.warning("spans cannot be delivered to %s; they are dropped until it answers again", self._url)
        elif self._failing and not failed:
            log.info("spans are delivered to %s again", self._url)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)
