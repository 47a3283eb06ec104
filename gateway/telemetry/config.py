"""Settings of telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """`otlp_url`: base URL of an OTLP/HTTP collector (`/v1/traces` is added when it has no path); None: no spans.

    `semconv`: generation of the GenAI attribute names. `queue_size`: spans held for a slow collector, the rest is dropped.
    """

    otlp_url: str | None = None
    otlp_headers: Mapping[str, str] = field(default_factory=dict)
    semconv: Literal["current", "legacy"] = "current"
    service_name: str = "turnkeep-gateway"
    service_version: str = ""
    queue_size: int = 2048
    export_interval: float = 2.0
    export_timeout: float = 5.0
