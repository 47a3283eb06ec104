"""Streaming chat completions from any OpenAI-compatible server, with the times at which the pieces came."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gateway.apis.headers import REPLICA

SESSION_HEADER = "X-Session-ID"
MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_ERROR_TEXT = 500


class ChatError(Exception):
    """A request without a whole answer: `status` is the HTTP status, None when there was none. The message is a sentence."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Answer:
    """A whole streamed answer.

    Seconds: `time_to_first_token` until the first piece of output (text, reasoning or a tool call), `gaps` between pieces,
    `duration` until the end of the stream. Token counts are the server's (None: not reported); `pieces` counts events with
    output.
    """

    started: float
    duration: float = 0.0
    time_to_first_token: float | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"))
    pieces: int = 0
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": None})
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    worker: str | None = None

    @property
    def output_tokens(self) -> int:
        """Generated tokens; where the server does not report them, the number of pieces stands in."""
        return self.pieces if self.completion_tokens is None else self.completion_tokens

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None for answers of one token."""
        if self.time_to_first_token is None or self.output_tokens < 2:
            return None
        return (self.duration - self.time_to_first_token) / (self.output_tokens - 1)


def normalise_url(url: str) -> str:
    """The base of a server's API, without /v1 and trailing slashes. Raises ValueError with a sentence."""
    base = url.strip().rstrip("/")
    base = base.removesuffix("/v1").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no URL of a server; it starts with http:// or https://")
    return base


class ChatClient:
    """One server. The aiohttp session is the caller's: its connection limit bounds what runs at once."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.base = normalise_url(url)
        self._http = http
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # `timeout` bounds the silence between two reads, not the whole answer.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout)

    async def models(self) -> list[str]:
        """Names of the server's models. Raises ChatError."""
        data = await self._json("GET", "/v1/models", None)
        models = data.get("data")
        names = [str(model["id"]) for model in models if "id" in model] if isinstance(models, list) else []
        if not names:
            raise ChatError(f"{self.base}/v1/models names no model")
        return names

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat prompt by the server's own /tokenize. Raises ChatError."""
        tokens = (await self._json("POST", "/tokenize", body)).get("tokens")
        if not isinstance(tokens, list):
            raise ChatError(f"{self.base}/tokenize answered without `tokens`")
        return tokens

    async def chat(self, body: Mapping[str, Any], *, session: str | None = None) -> Answer:
        """Streams one chat completion to its end. Sets `stream` and asks for usage. Raises ChatError."""
        headers = {**self._headers, "Content-Type": "application/json"}
        if session is not None:
            headers[SESSION_HEADER] = session
        data = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        answer = Answer(started=time.perf_counter())
        try:
            async with self._http.post(
                f"{self.base}/v1/chat/completions", data=data, headers=headers, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    raise ChatError(await _refusal(response), response.status)
                answer.worker = response.headers.get(REPLICA)
                await _collect(response, answer)
        except TimeoutError as error:
            raise ChatError(f"{self.base} was silent for too long") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ChatError(f"{self.base}: {_describe(error)}") from error
        return answer

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": "application/json"} if data is not None else self._headers
        try:
            async with self._http.request(
                method, f"{self.base}{path}", data=data, headers=headers, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    raise ChatError(f"{path}: {await _refusal(response)}", response.status)
                value = msgspec.json.decode(await response.read())
        except msgspec.DecodeError as error:
            raise ChatError(f"{self.base}{path} answered with something that is no JSON") from error
        except TimeoutError as error:
            raise ChatError(f"{self.base}{path} was silent for too long") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ChatError(f"{self.base}{path}: {_describe(error)}") from error
        if not isinstance(value, dict):
            raise ChatError(f"{self.base}{path} answered with something that is no JSON object")
        return value


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({error.os_error.strerror or error.os_error})"
    return f"{error}" or type(error).__name__


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The server's own sentence where it gives one."""
    text = (await response.content.read(65536)).decode("utf-8", "replace")
    try:
        body = msgspec.json.decode(text)
    except msgspec.DecodeError:
        body = None
    message = _error_message(body) or text.strip() or response.reason or "no reason given"
    return f"HTTP {response.status}: {message[:MAX_ERROR_TEXT]}"


def _error_message(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else None


async def _collect(response: aiohttp.ClientResponse, answer: Answer) -> None:
    last: float | None = None
    done = False
    async for arrived, data in _events(response):
        if data == b"[DONE]":
            done = True
            break
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ChatError("the stream held an event that is no JSON", 200) from error
        if message := _error_message(event):
            raise ChatError(f"the stream ended with an error: {message[:MAX_ERROR_TEXT]}", 200)
        if not isinstance(event, dict):
            raise ChatError("the stream held an event that is no JSON object", 200)
        _take_usage(event.get("usage"), answer)
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            if _take_delta(choice.get("delta") or {}, answer.message):
                answer.pieces += 1
                if last is None:
                    answer.time_to_first_token = arrived - answer.started
                else:
                    answer.gaps.append(arrived - last)
                last = arrived
            if choice.get("finish_reason") is not None:
                answer.finish_reason = choice["finish_reason"]
                if last is None:
                    # An answer whose tokens make no text (half a character, a swallowed tag): its end is the first sign.
                    answer.time_to_first_token = arrived - answer.started
    answer.duration = time.perf_counter() - answer.started
    if not done:
        raise ChatError("the stream ended without [DONE]", 200)
    if answer.finish_reason is None:
        raise ChatError("the stream ended without a finish_reason", 200)
    for call in answer.message.get("tool_calls", ()):
        call.pop("index", None)


def _take_usage(usage: Any, answer: Answer) -> None:
    if not isinstance(usage, dict):
        return
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
    answer.completion_tokens = usage.get("completion_tokens", answer.completion_tokens)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)


def _take_delta(delta: dict[str, Any], message: dict[str, Any]) -> bool:
    """Adds a delta to the message; True when it held output."""
    output = False
    for name in ("content", "reasoning_content"):
        text = delta.get(name)
        if text:
            message[name] = (message.get(name) or "") + text
            output = True
    for piece in delta.get("tool_calls") or ():
        output = True
        calls = message.setdefault("tool_calls", [])
        index = piece.get("index", 0)
        call = next((call for call in calls if call["index"] == index), None)
        if call is None:
            call = {"index": index, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            calls.append(call)
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
    return output


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """(arrival, data) of each server-sent event with data; comments and other fields are passed over."""
    buffer = bytearray()
    async for received in response.content.iter_any():
        arrived = time.perf_counter()
        buffer += received
        while (newline := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:newline]).rstrip(b"\r")
            del buffer[: newline + 1]
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()
        if len(buffer) > MAX_EVENT_BYTES:
            raise ChatError(f"the stream held an event longer than {MAX_EVENT_BYTES} bytes", 200)
