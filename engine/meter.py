"""Totals and rates of what an engine did."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_SECONDS = 30.0
"""Of step time, not of wall time: an idle engine keeps what it knows."""


class Rate:
    """Tokens a second, weighing what was seen `HALF_LIFE_SECONDS` of work ago half."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float:
        """Tokens a second; 0 before anything was seen."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """`tokens` took `seconds`."""
        decay = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds


@dataclass(slots=True)
class Totals:
    """Counts since the start, as `WorkerStats` names them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    decode_passes: int = 0
    preemptions: int = 0
    requests: int = 0
    aborted: int = 0


class Meter:
    """Splits step time between prefill and decode."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.prefill = Rate()
        self.decode = Rate()

    def step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step of `seconds` computed these. In a mixed one decode is charged what it takes alone (prefill is bound by compute
        and decode rides along), or its share of the tokens while that is not known."""
        if not decode_tokens:
            self.prefill.add(prefill_tokens, seconds)
        elif not prefill_tokens:
            self.decode.add(decode_tokens, seconds)
        elif self.decode.value > 0:
            self.prefill.add(prefill_tokens, seconds - min(decode_tokens / self.decode.value, seconds / 2))
        else:
            decode_seconds = seconds * decode_tokens / (prefill_tokens + decode_tokens)
            self.decode.add(decode_tokens, decode_seconds)
            self.prefill.add(prefill_tokens, seconds - decode_seconds)
