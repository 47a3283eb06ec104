"""vLLM's completion events as chunks of the worker protocol."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from gateway.workers.base import WorkerRefusedError, WorkerUnavailableError
from gateway.workers.protocol import (
    Chunk,
    Done,
    ErrorDetail,
    Finished,
    FinishReason,
    Started,
    TokenLogprob,
    Tokens,
)
from gateway.workers.sse import SseReader
from gateway.workers.transport import BUSY, NOT_THE_CLIENTS_FAULT

_END_OF_BODY_SECONDS = 0.5
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


NO_ERROR = msgspec.Raw(b"null")
"""For fields that are absent where nothing went wrong: msgspec takes no union of Raw and None."""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = NO_ERROR
    object: str = ""
    message: str = ""
    code: int | None = None


_EVENTS = msgspec.json.Decoder(_Event)


class CompletionStream:
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
        self._reader = SseReader(
            response, f"the stream of worker {url}", _EVENT_BYTES + _EVENT_BYTES_PER_PROMPT_TOKEN * len(prompt)
        )
        self._url = url
        self._prompt = prompt
        self._copies = copies
        self._clock = clock
        self._accepted_at = clock()
        self._first_at: float | None = None
        self._ready: deque[Chunk] = deque()
        self._usage: _Usage | None = None
        self._generated = 0
        self._ended = False

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            data = await self._reader.read()
            if data is None:
                raise self._broken("ended in the middle")
            self._take(data)
        return self._ready.popleft()

    def close(self) -> None:
        self._reader.lines.close()

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(_END_OF_BODY_SECONDS):
                whole = self._ended and await self._reader.lines.finish()
        except TimeoutError:
            whole = False
        if whole:
            self._reader.lines.release()
        else:
            self._reader.lines.close()

    def _take(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self._done()
            return
        try:
            event = _EVENTS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"sent an event that is none of vLLM's: {error}") from error
        if bytes(event.error) != b"null" or event.object == "error":
            self._failed(event)
            return
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

    def _failed(self, event: _Event) -> None:
        status, message, param = error_parts(event.error, event.message, event.code)
        if self._first_at is None and is_refusal(status):
            # Accepted with a 200, looked at only then: nothing has been generated, and no other vLLM would take it.
            raise WorkerRefusedError(status, error_detail(message, param))
        raise WorkerUnavailableError(f"worker {self._url} broke off its answer: {message}", reached=True, busy=status in BUSY)

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

    def _broken(self, how: str) -> WorkerUnavailableError:
        self.close()
        return WorkerUnavailableError(f"the stream of worker {self._url} {how}", reached=True)


def is_refusal(status: int) -> bool:
    """True for an answer that another worker would give as well."""
    return 400 <= status < 500 and status not in NOT_THE_CLIENTS_FAULT and status not in BUSY


class _ErrorBody(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


_ERROR_BODIES = msgspec.json.Decoder(_ErrorBody)


def error_parts(raw: msgspec.Raw, message: str, code: Any, status: int = 500) -> tuple[int, str, str | None]:
    """Status, sentence and parameter of an error in OpenAI's shape, or in vLLM's older flat one."""
    param = None
    if bytes(raw) != b"null":
        try:
            body = _ERROR_BODIES.decode(raw)
            message, code, param = body.message or message, body.code if body.code is not None else code, body.param
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = message or bytes(raw)[:200].decode("utf-8", "replace")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    return status, message[:2000] or "no reason given", param


def error_detail(message: str, param: str | None) -> ErrorDetail:
    """A refusal in the words of the worker protocol."""
    if param == "input_tokens" or "maximum context length" in message:
        return ErrorDetail("context_length_exceeded", message)
    if param is not None and param.startswith("structured_outputs"):
        return ErrorDetail("invalid_grammar", message, "grammar")
    return ErrorDetail("invalid_request", message, param)
