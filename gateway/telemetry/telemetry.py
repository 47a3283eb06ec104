"""One object that the API layer tells about turns; it keeps the metrics and, when asked, the spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from gateway.telemetry.config import TelemetryConfig
from gateway.turn import Receipt, Turn
from gateway.workers.views import WorkerView

Operation = Literal["chat", "text_completion"]


class TurnSpan(Protocol):
    """One turn from its arrival to its end. Exactly one of `finished` and `failed` ends it; later calls do nothing."""

    def trace_headers(self) -> dict[str, str]:
        """W3C headers to send to the worker: this span as parent, or the caller's context when spans are off."""

    def dispatched(self, receipt: Receipt) -> None: ...

    def first_token(self) -> None: ...

    def finished(
        self,
        *,
        response_id: str,
        response_model: str,
        finish_reasons: Sequence[str],
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
    ) -> None: ...

    def failed(self, error: BaseException) -> None:
        """The turn ended without an answer: a TurnError (its status and code are recorded), a disconnect
        (asyncio.CancelledError: status 499), or an unforeseen error (500)."""


class Telemetry:
    """Spans and metrics of one gateway process."""

    METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, config: TelemetryConfig | None = None) -> None: ...

    def start_turn(self, operation: Operation, turn: Turn, headers: Mapping[str, str]) -> TurnSpan:
        """`headers`: of the client's request; traceparent and tracestate are honoured."""
        raise NotImplementedError

    def render_metrics(self) -> bytes:
        raise NotImplementedError

    def watch_pool(self, workers: Callable[[], Sequence[WorkerView]]) -> None:
        """Where the metrics find the workers."""

    def worker_failed(self, worker: str) -> None:
        """A worker failed a request before its first chunk."""

    async def aclose(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        raise NotImplementedError
