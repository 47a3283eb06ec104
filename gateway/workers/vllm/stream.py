"""vLLM's completion events as chunks of the worker protocol."""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp
import msgspec

from gateway.workers.protocol import Done, Finished, FinishReason, Started, TokenLogprob, Tokens
from gateway.workers.sse_chunks import NO_ERROR, SseChunks, error_parts

_EVENT_BYTES = 2**20
# vLLM repeats the prompt's ids in the first event of each choice.
_EVENT_BYTES_PER_PROMPT_TOKEN = 16
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_TOKEN_PREFIX = "token_id:"


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = NO_ERROR
    object: str = ""
    message: str = ""
    code: int | None = None


_EVENTS = msgspec.json.Decoder(_Event)


class CompletionStream(SseChunks):
    """A `ChunkStream` over /v1/completions with return_token_ids. What vLLM does not say is measured here: prefill seconds run
    from acceptance to the first token. `copies`: choices that are all the same, of which vLLM was asked for one."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        url: str,
        prompt: list[int],
        *,
        copies: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(response, url, _EVENT_BYTES + _EVENT_BYTES_PER_PROMPT_TOKEN * len(prompt), clock)
        self._prompt = prompt
        self._copies = copies
        self._usage: _Usage | None = None
        self._generated = 0

    def _take(self, data: bytes) -> None:
        try:
            event = _EVENTS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"sent an event that is none of vLLM's: {error}") from error
        if bytes(event.error) != b"null" or event.object == "error":
            raise self._failed(*error_parts(event.error, event.message, event.code))
        if self._first_at is None and event.choices:
            self._first_at = self._clock()
            self._ready.append(Started(len(self._prompt), 0, 0.0, cached_known=False))
        for choice in event.choices:
            self._choice(choice)
        if event.usage is not None:
            self._usage = event.usage

    def _choice(self, choice: _Choice) -> None:
        echoed = choice.prompt_token_ids
        if echoed is not None and echoed != self._prompt:
            raise self._broken(f"answered another prompt: {len(echoed)} tokens, where {len(self._prompt)} were sent")
        ids = tuple(choice.token_ids or ())
        if ids:
            logprobs = self._logprobs(choice.logprobs, ids)
            for copy in self._indices(choice):
                self._generated += len(ids)
                self._ready.append(Tokens(ids, copy, logprobs))
        elif choice.token_ids is None and choice.finish_reason is None:
            raise self._broken("sent text without token ids; it must be a vLLM of version 0.10.2 or later")
        if choice.finish_reason is not None:
            reason = _REASONS.get(choice.finish_reason)
            if reason is None:
                raise self._broken(f"ended a choice with '{choice.finish_reason[:64]}'")
            self._ready.extend(Finished(reason, copy, choice.stop_reason) for copy in self._indices(choice))

    def _indices(self, choice: _Choice) -> range:
        return range(self._copies) if self._copies > 1 and choice.index == 0 else range(choice.index, choice.index + 1)

    def _logprobs(self, given: _Logprobs | None, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if given is None:
            return ()
        if len(given.token_logprobs) != len(ids):
            raise self._broken(f"sent {len(given.token_logprobs)} logprobs for {len(ids)} tokens")
        tops = given.top_logprobs or [None] * len(ids)
        if len(tops) != len(ids):
            raise self._broken(f"sent top logprobs of {len(tops)} tokens for {len(ids)}")
        return tuple(
            TokenLogprob(token, logprob if logprob is not None else 0.0, self._top(top))
            for token, logprob, top in zip(ids, given.token_logprobs, tops, strict=True)
        )

    def _top(self, top: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
        try:
            pairs = [(int(token.removeprefix(_TOKEN_PREFIX)), logprob) for token, logprob in (top or {}).items()]
        except ValueError as error:
            raise self._broken("sent logprobs of texts, not of token ids") from error
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))

    def _done(self) -> None:
        if self._first_at is None:
            raise self._broken("ended without an answer")
        now, usage = self._clock(), self._usage
        details = usage.prompt_tokens_details if usage is not None else None
        cached = details.cached_tokens if details is not None else None
        self._ended = True
        self._ready.append(
            Done(
                prompt_tokens=len(self._prompt),
                completion_tokens=self._generated,
                cached_tokens=min(max(cached or 0, 0), len(self._prompt)),
                queue_seconds=0.0,
                prefill_seconds=self._first_at - self._accepted_at,
                decode_seconds=now - self._first_at,
                preemptions=0,
                cached_known=cached is not None,
            )
        )
