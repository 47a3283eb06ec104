"""When a generation ends: EOS, stop ids, stop strings, length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.workers.protocol import SamplingParams
from grammar.detokenizer import Detokenizer
from grammar.stop import TextStream


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The generation ends with the token just appended. `stop_reason`: the stop string or stop id; None: EOS or length."""

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class StopChecker:
    """Decides after every token of one choice whether it was the last.

    eos_token_ids: the model's end tokens. detokenizer: an empty one, needed only where `params.stop` is not empty.
    max_total: tokens that prompt (`prompt_tokens` of it) and generation may hold together; None: no limit.

    EOS and stop ids end the generation whenever they come, and have no text: the sampler masks them until `min_tokens`, so
    earlier ones were forced by a grammar that leaves no other token. Stop strings are looked for in the text that comes after
    the first `min_tokens` tokens (as vLLM does). A token that both stops and fills the length counts as a stop.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: tuple[int, ...],
        detokenizer: Detokenizer | None = None,
        *,
        prompt_tokens: int = 0,
        max_total: int | None = None,
    ) -> None:
        if params.stop and detokenizer is None:
            raise ValueError("Stop strings need a detokenizer.")
        limits = [] if params.max_tokens is None else [params.max_tokens]
        if max_total is not None:
            limits.append(max_total - prompt_tokens)
        self._limit = min(limits, default=None)
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._generated = 0
        self._stream: TextStream | None = None
        if params.stop and detokenizer is not None:
            self._stream = TextStream(
                detokenizer.showing(params.visible_tokens),
                params.stop,
                params.stop_exempt,
                after=params.stop_after,
                min_tokens=params.min_tokens,
            )

    @property
    def generated(self) -> int:
        """Tokens appended so far."""
        return self._generated

    def append(self, token_id: int) -> StopDecision | None:
        """Counts and reads one generated token; None: go on."""
        self._generated += 1
        if token_id in self._eos:
            return StopDecision("stop", self._last_match())
        if token_id in self._stop_ids:
            return StopDecision("stop", self._last_match() or token_id)
        matched = None if self._stream is None else self._stream.feed((token_id,))[1]
        if matched is not None:
            return StopDecision("stop", matched)
        if self._limit is not None and self._generated >= self._limit:
            matched = self._last_match()
            return StopDecision("length") if matched is None else StopDecision("stop", matched)
        return None

    def _last_match(self) -> str | None:
        """The stop string found once no more text comes: one that could still have become part of an exempt region."""
        if self._stream is None:
            return None
        self._stream.finish()
        return self._stream.matched
