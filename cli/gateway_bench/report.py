"""What a run measured, and the figures that are printed of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.gateway_bench.load import TurnMeasure


@dataclass(slots=True)
class SideReport:
    """One router. `cpu`: processor seconds of each turn number, over all conversations; `seconds`: by the clock, with what the
    client and the workers take. `stages`: seconds of the run."""

    name: str
    turns: list[TurnMeasure] = field(default_factory=list)
    cpu: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    rss: int = 0
    sessions: int = 1
    measured: bool = True

    def cpu_ms(self, turns: Sequence[int] | None = None) -> float | None:
        """Milliseconds of processor time a turn, the mean over these turn numbers (None: all)."""
        if not self.measured:
            return None
        chosen = [self.cpu[turn] for turn in (turns if turns is not None else self.cpu) if turn in self.cpu]
        return sum(chosen) / len(chosen) / self.sessions * 1e3 if chosen else None

    def body_bytes(self, turns: Sequence[int] | None = None) -> float:
        """Of a turn, the mean."""
        return statistics.fmean(turn.body_bytes for turn in self.turns if turns is None or turn.turn in turns)

    def latency_ms(self, quantile: float) -> float:
        """At the client; the workers answer at once."""
        values = sorted(turn.seconds for turn in self.turns)
        return values[min(int(quantile * len(values)), len(values) - 1)] * 1e3

    def turns_per_second(self, turns: Sequence[int]) -> float | None:
        """By the clock, over these turn numbers."""
        seconds = sum(self.seconds.get(turn, 0.0) for turn in turns)
        return len(turns) * self.sessions / seconds if seconds else None

    def stage_ms(self) -> dict[str, float]:
        """A turn, the mean; `proxy` is what the process spent beside its stages."""
        count = len(self.turns)
        stages = {name: seconds / count * 1e3 for name, seconds in self.stages.items()}
        whole = self.cpu_ms()
        if stages and whole is not None:
            stages["proxy"] = max(whole - sum(stages.values()), 0.0)
        return stages

    def as_json(self) -> dict[str, Any]:
        numbers = sorted(self.cpu)
        last = numbers[-5:]
        cpu_last = self.cpu_ms(last)
        return {
            "name": self.name,
            "turns": len(self.turns),
            "mean_body_bytes": round(self.body_bytes()),
            "cpu_ms": self.cpu_ms(),
            "stages_ms": self.stage_ms(),
            "cpu_ms_by_turn": {turn: self.cpu_ms([turn]) for turn in numbers},
            "body_bytes_by_turn": {turn: round(self.body_bytes([turn])) for turn in numbers},
            "prompt_tokens_last": max((turn.prompt_tokens for turn in self.turns), default=0),
            "turns_per_core_second_at_the_end": 1e3 / cpu_last if cpu_last else None,
            "turns_per_second_at_the_end": self.turns_per_second(last),
            "latency_ms": {"p50": self.latency_ms(0.5), "p99": self.latency_ms(0.99)},
            "cached_share": sum(t.cached_tokens for t in self.turns) / max(sum(t.prompt_tokens for t in self.turns), 1),
            "rss_bytes": self.rss or None,
        }
