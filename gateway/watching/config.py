"""Settings of the miss explainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissesConfig:
    """`explain`: look for the cause of misses. `excerpts`: show a short piece of both texts where they part. `max_bytes`: for
    the text of sessions' last turns, and what is remembered of misses; the least recently used go first. `per_session`:
    misses remembered of one session."""

    explain: bool = True
    excerpts: bool = True
    max_bytes: int = 64 * 2**20
    per_session: int = 32

    def __post_init__(self) -> None:
        for name in ("max_bytes", "per_session"):
            if getattr(self, name) < 1:
                raise ValueError(f"misses.{name} must be at least 1, not {getattr(self, name)}")
