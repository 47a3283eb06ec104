"""SGLang's events as chunks of the worker protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from gateway.workers.protocol import Done, Finished, FinishReason, Started, TokenLogprob, Tokens
from gateway.workers.sse_chunks import NO_ERROR, SseChunks, error_parts

_EVENT_BYTES = 2**20
# Each event repeats all of the answer so far, unless the server was told otherwise; with log-probabilities more so.
_EVENT_BYTES_PER_TOKEN = 32
_EVENT_BYTES_PER_LOGPROB = 96
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: list[int] | None = None
    index: int = 0
    error: msgspec.Raw = NO_ERROR


_EVENTS = msgspec.json.Decoder(_Event)


class GenerateStream(SseChunks):
    """A `ChunkStream` over /generate. Events carry all ids of a choice so far or only the new ones, by how the server was
    started; the count of tokens beside them tells which."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        url: str,
        prompt_tokens: int,
        max_tokens: int,
        choices: int,
        logprobs: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        each = _EVENT_BYTES_PER_TOKEN + (0 if logprobs is None else _EVENT_BYTES_PER_LOGPROB * (1 + logprobs))
        super().__init__(response, url, _EVENT_BYTES + each * max_tokens, clock)
        self._prompt_tokens = prompt_tokens
        self._seen = [0] * choices
        self._finished = [False] * choices
        self._cached: int | None = None

    def _take(self, data: bytes) -> None:
        try:
            event = _EVENTS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"sent an event that is none of SGLang's: {error}") from error
        if bytes(event.error) != b"null":
            # It says of errors neither status nor kind; before the first token they are complaints about the request.
            raise self._failed(*error_parts(event.error, "", None, 400 if self._first_at is None else 500))
        meta, index = event.meta_info, event.index
        if meta is None or not 0 <= index < len(self._seen):
            raise self._broken("sent an event without meta_info" if meta is None else f"answers with choice {index}")
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort" and (finish.status_code or 0) >= 400:
            raise self._failed(finish.status_code or 500, finish.message or "aborted", None)
        if self._first_at is None:
            self._first_at = self._clock()
            self._cached = meta.cached_tokens
            cached = min(max(meta.cached_tokens or 0, 0), self._prompt_tokens)
            self._ready.append(Started(self._prompt_tokens, cached, 0.0, cached_known=meta.cached_tokens is not None))
        self._tokens(event, meta)
        if finish is not None:
            self._end(index, finish)

    def _tokens(self, event: _Event, meta: _Meta) -> None:
        ids, before = event.output_ids or [], self._seen[event.index]
        if meta.completion_tokens == len(ids):
            fresh = ids[before:]
        elif meta.completion_tokens == before + len(ids):
            fresh = ids
        else:
            raise self._broken(f"counts {meta.completion_tokens} tokens where {before} came before and {len(ids)} with it")
        if meta.completion_tokens < before:
            raise self._broken("takes tokens back")
        if fresh:
            self._seen[event.index] = meta.completion_tokens
            self._ready.append(Tokens(tuple(fresh), event.index, self._logprobs(meta, fresh)))

    def _logprobs(self, meta: _Meta, fresh: list[int]) -> tuple[TokenLogprob, ...]:
        given = meta.output_token_logprobs
        if given is None:
            return ()
        entries = given[-len(fresh) :]
        tops: list[list[tuple[float, int, str | None]] | None]
        tops = (meta.output_top_logprobs or [])[-len(fresh) :] or [None] * len(fresh)
        if len(entries) != len(fresh) or len(tops) != len(fresh) or [token for _, token, _ in entries] != fresh:
            raise self._broken(f"sent logprobs that are not those of its {len(fresh)} tokens")
        return tuple(
            TokenLogprob(token, logprob or 0.0, tuple((other, value) for value, other, _ in top or ()))
            for (logprob, token, _), top in zip(entries, tops, strict=True)
        )

    def _end(self, index: int, finish: _Finish) -> None:
        reason = _REASONS.get(finish.type)
        if reason is None:
            raise self._broken(f"ended a choice with '{finish.type[:64]}'")
        matched = finish.matched if isinstance(finish.matched, str | int) else None
        self._ready.append(Finished(reason, index, matched))
        self._finished[index] = True

    def _done(self) -> None:
        if self._first_at is None or not all(self._finished):
            raise self._broken("ended before its answer did")
        now = self._clock()
        self._ended = True
        self._ready.append(
            Done(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=sum(self._seen),
                cached_tokens=min(max(self._cached or 0, 0), self._prompt_tokens),
                queue_seconds=0.0,
                prefill_seconds=self._first_at - self._accepted_at,
                decode_seconds=now - self._first_at,
                preemptions=0,
                cached_known=self._cached is not None,
            )
        )
