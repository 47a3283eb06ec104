"""Settings of admission; times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.access.entries import PriorityClass


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """`ahead`: what a worker is given beyond what its KV holds at once, as a share of it, so that its scheduler has a choice.
    `output_reserve`: tokens of an answer for which KV is set aside, where `max_tokens` does not say less. `queue_size`: turns
    that may wait, of each class. `max_queued_tokens`: of their prompts, over all classes. `queue_timeout`: for which the first
    turn of a session waits; `session_queue_timeout`: for which later ones do. `high_weight`, `normal_weight`, `low_weight`: the
    shares of classes that wait for the same workers. `max_retry_after`: the largest Retry-After that is given."""

    ahead: float = 0.5
    output_reserve: int = 2048
    queue_size: int = 256
    max_queued_tokens: int = 8_000_000
    queue_timeout: float = 30.0
    session_queue_timeout: float = 120.0
    high_weight: float = 16.0
    normal_weight: float = 4.0
    low_weight: float = 1.0
    max_retry_after: float = 60.0

    def __post_init__(self) -> None:
        if not self.ahead >= 0:
            raise ValueError(f"admission.ahead must be zero or more, not {self.ahead}")
        for name in ("output_reserve", "queue_size", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"admission.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("queue_timeout", "session_queue_timeout", "max_retry_after", "high_weight", "normal_weight", "low_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"admission.{name} must be positive, not {getattr(self, name)}")

    def weight(self, priority: PriorityClass) -> float:
        """The share of a class."""
        return {"high": self.high_weight, "normal": self.normal_weight, "low": self.low_weight}[priority]
