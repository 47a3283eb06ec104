"""Conversations that grow by a question and an answer a turn, sent whole each time, as agents send them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

WORDS = (
    *("the", "to", "of", "and", "in", "is", "it", "we", "for", "on", "as", "by", "at", "be", "or", "an", "if", "no", "so"),
    *("not", "you", "can", "has", "its", "was", "but", "one", "all", "new", "use", "get", "set", "put", "add", "end", "old"),
    *("file", "name", "path", "list", "read", "code", "line", "text", "test", "data", "type", "time", "true", "none", "call"),
    *("value", "error", "index", "class", "table", "write", "model", "state", "result", "string", "number", "object"),
)
"""One token each, four bytes with the space: what English and code come to."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """`sessions` conversations of `turns` turns; each question has `words` words (about a token each), each answer
    `output_tokens` tokens. `stream`: answers come as events. `at_once`: conversations that take a turn at the same time.
    `pause`: seconds before they do."""

    sessions: int = 4
    turns: int = 100
    words: int = 960
    output_tokens: int = 16
    stream: bool = False
    seed: int = 0
    at_once: int = 1
    pause: float = 0.0


@dataclass(slots=True)
class TurnMeasure:
    """One turn of one conversation on one side. Seconds and bytes."""

    turn: int
    body_bytes: int
    seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Conversation:
    """What one side has been told and has answered. Equal seeds ask the same on every side."""

    name: str
    seed: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    def ask(self, config: LoadConfig) -> bytes:
        """The body of the next turn."""
        rng = random.Random(self.seed * 100_003 + self.asked)
        if not self.messages:
            self.messages.append({"role": "system", "content": "You are a helpful agent. " + _words(rng, config.words)})
        self.messages.append({"role": "user", "content": _words(rng, config.words)})
        self.asked += 1
        body: dict[str, Any] = {"messages": self.messages, "max_tokens": config.output_tokens, "stream": config.stream}
        if config.stream:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body)

    def answered(self, text: str) -> None:
        """The answer joins the conversation."""
        self.messages.append({"role": "assistant", "content": text or "nothing"})


class LoadError(Exception):
    """A turn was not answered. The message says by whom and how."""


async def send(
    client: aiohttp.ClientSession, url: str, model: str | None, conversation: Conversation, config: LoadConfig
) -> TurnMeasure:
    """One turn. Raises LoadError."""
    body = conversation.ask(config)
    if model is not None:
        body = b'{"model":' + orjson.dumps(model) + b"," + body[1:]
    headers = {"X-Session-ID": conversation.name, "Content-Type": "application/json"}
    began = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            raw = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise LoadError(f"{url} did not answer: {error or type(error).__name__}.") from error
    seconds = time.perf_counter() - began
    if response.status != 200:
        raise LoadError(f"{url} answered {response.status}: {raw[:300].decode('utf-8', 'replace')}")
    text, usage = _events(raw) if config.stream else _whole(raw)
    conversation.answered(text)
    details = usage.get("prompt_tokens_details") or {}
    return TurnMeasure(
        conversation.asked, len(body), seconds, usage.get("prompt_tokens", 0), details.get("cached_tokens", 0) or 0
    )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _whole(raw: bytes) -> tuple[str, dict[str, Any]]:
    answer = orjson.loads(raw)
    return answer["choices"][0]["message"].get("content") or "", answer.get("usage") or {}


def _events(raw: bytes) -> tuple[str, dict[str, Any]]:
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for frame in raw.split(b"\n\n"):
        if frame.startswith(b"data: {"):
            chunk = orjson.loads(frame[6:])
            usage = chunk.get("usage") or usage
            texts += [choice["delta"].get("content") or "" for choice in chunk.get("choices") or ()]
    return "".join(texts), usage


def conversations(config: LoadConfig, side: str) -> Sequence[Conversation]:
    """One side's conversations, none of them begun."""
    return [Conversation(f"{side}-{number}", config.seed * 1000 + number) for number in range(config.sessions)]
