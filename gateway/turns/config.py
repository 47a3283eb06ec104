"""Settings of turns that are shared by their retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnsConfig:
    """`attach`: whether a retry joins the turn that is still running. Bytes are estimates of what is held in memory.

    `max_turn_bytes`: events kept of one turn for those who may still attach; a turn that says more is not attached to as a
    stream any more. `max_total_bytes`: the same over all turns, kept answers among them. `max_answers` and `answer_ttl`
    (seconds): finished turns with an Idempotency-Key whose answer is given again.
    """

    attach: bool = True
    max_turn_bytes: int = 2**20
    max_total_bytes: int = 64 * 2**20
    max_answers: int = 1024
    answer_ttl: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_turn_bytes", "max_total_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"turns.{name} must be at least 1, not {getattr(self, name)}")
        if self.max_answers < 0:
            raise ValueError(f"turns.max_answers must be at least 0 (none are kept), not {self.max_answers}")
        if not self.answer_ttl >= 0:
            raise ValueError(f"turns.answer_ttl must be at least 0 seconds, not {self.answer_ttl}")
