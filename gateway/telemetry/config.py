"""Settings of telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """`otlp_url`: of an OTLP/HTTP collector (`/v1/traces` is added when it has no path); None: no spans are made.

    `semconv`: generation of the GenAI attribute names (docs/telemetry.md). `queue_size`: spans held for a slow collector,
    the oldest are dropped beyond that. `export_interval`, `export_timeout`: seconds.
    """

    otlp_url: str | None = None
    otlp_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    semconv: Literal["current", "legacy"] = "current"
    service_name: str = "turnkeep-gateway"
    service_version: str = ""
    queue_size: int = 2048
    export_interval: float = 2.0
    export_timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.semconv not in ("current", "legacy"):
            raise ValueError(f"telemetry.semconv must be 'current' or 'legacy', not '{self.semconv}'")
        if self.otlp_url is not None:
            parts = urlsplit(self.otlp_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"the OTLP address must be a URL like http://127.0.0.1:4318, not '{self.otlp_url}'")
        for name in ("queue_size", "export_interval", "export_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"telemetry.{name} must be positive, not {getattr(self, name)}")

    @property
    def traces_url(self) -> str | None:
        """Where spans are posted."""
        if self.otlp_url is None:
            return None
        has_path = urlsplit(self.otlp_url).path.strip("/") != ""
        return self.otlp_url if has_path else self.otlp_url.rstrip("/") + "/v1/traces"
