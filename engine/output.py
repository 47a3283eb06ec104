"""What a step says to the outside: chunks per request, in the order of the worker protocol."""

from __future__ import annotations

from engine.request import Request
from engine.sampling.sampler import SampledToken
from engine.sampling.stopping import StopDecision
from gateway.workers.protocol import Chunk, Done, Failed, Finished, Started, TokenLogprob, Tokens

Addressed = tuple[str, Chunk]
"""(request id, chunk)."""


class StepOutput:
    """Collects the chunks of one step."""

    def __init__(self) -> None:
        self.chunks: list[Addressed] = []
        self._tokens: dict[tuple[str, int], int] = {}  # where the tokens of a choice stand

    def started(self, request: Request) -> None:
        """The request left the queue."""
        queued = (request.started_at or 0.0) - request.added_at
        self._say(request, Started(request.prompt_tokens, request.cached_tokens, queued))

    def token(self, request: Request, index: int, sampled: SampledToken) -> None:
        """A new token of a choice. Those of one step travel together."""
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.params.logprobs is not None and sampled.logprob is not None:
            logprobs = (TokenLogprob(sampled.token_id, sampled.logprob, sampled.top),)
        place = self._tokens.setdefault((request.request_id, index), len(self.chunks))
        if place == len(self.chunks):
            self._say(request, Tokens((sampled.token_id,), index, logprobs))
            return
        request_id, before = self.chunks[place]
        if isinstance(before, Tokens):
            together = Tokens((*before.token_ids, sampled.token_id), index, (*before.logprobs, *logprobs))
            self.chunks[place] = (request_id, together)

    def finished(self, request: Request, index: int, decision: StopDecision) -> None:
        """The end of a choice."""
        self._say(request, Finished(decision.finish_reason, index, decision.stop_reason))

    def done(self, request: Request, now: float) -> None:
        """The end of a request; `now` on the engine's clock."""
        started_at = now if request.started_at is None else request.started_at
        first_token_at = now if request.first_token_at is None else request.first_token_at
        self._say(
            request,
            Done(
                prompt_tokens=request.prompt_tokens,
                completion_tokens=request.completion_tokens,
                cached_tokens=request.cached_tokens,
                queue_seconds=started_at - request.added_at,
                prefill_seconds=first_token_at - started_at,
                decode_seconds=now - first_token_at,
                preemptions=request.preemptions,
                drafted_tokens=request.drafted_tokens,
                accepted_tokens=request.accepted_tokens,
                forced_tokens=request.forced_tokens,
                decode_passes=request.decode_passes,
            ),
        )

    def failed(self, request: Request, code: str, message: str) -> None:
        """The request cannot go on."""
        self._say(request, Failed(code, message))

    def _say(self, request: Request, chunk: Chunk) -> None:
        self.chunks.append((request.request_id, chunk))
