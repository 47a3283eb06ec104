"""Replays trajectories against OpenAI-compatible servers and measures what comes back.

Sessions run side by side; within a session turn k+1 starts when turn k has ended and the (scaled) tool gap has passed.
The history is the recorded one, whatever the server generates, so that every run of a trace sends the same prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from traces.chat_client import Answer, ChatClient, ChatError
from traces.format import TraceFormatError
from traces.history import RecordedTurn
from traces.index import SessionEntry
from traces.samples import Samples
from traces.unlimited_cache import GivenAnswers

MAX_ERRORS_KEPT = 20

UNFORCEABLE = frozenset(
    {"stop", "stop_token_ids", "response_format", "n", "max_completion_tokens", "max_tokens", "min_tokens", "ignore_eos"}
    | {"tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "structured_outputs", "truncate_prompt_tokens"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "stream_options"}
)
"""Fields that can end an answer before its forced length, or cost something that the length does not say."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds a turn must keep to count as good; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> Goodput:
        """From `ttft:500`, `tpot:50`, `e2el:2000`. Raises ValueError with a sentence."""
        values: dict[str, float] = {}
        for limit in limits:
            name, _, number = limit.partition(":")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if name not in ("ttft", "tpot", "e2el") or not 0 < value < float("inf"):
                raise ValueError(f"{limit!r} is no goodput limit; write ttft:MS, tpot:MS or e2el:MS with milliseconds above 0")
            values[name] = value
        return cls(**values)

    @property
    def limited(self) -> bool:
        return (self.ttft, self.tpot, self.e2el) != (None, None, None)

    def good(self, answer: Answer) -> bool:
        measured = (answer.time_to_first_token, answer.time_per_output_token, answer.duration)
        return all(
            limit is None or seconds is None or seconds * 1000 <= limit
            for limit, seconds in zip((self.ttft, self.tpot, self.e2el), measured, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """`gap_scale` multiplies the recorded tool gaps (0: none). `forced`: every answer gets its recorded length.

    `model` None: the recorded name where the server has it, else the server's first. `session_prefix` keeps the sessions of
    two runs apart on a server that remembers them.
    """

    concurrency: int = 8
    gap_scale: float = 1.0
    forced: bool = True
    model: str | None = None
    goodput: Goodput = Goodput()
    session_prefix: str = ""


@dataclass(slots=True)
class ReplayResult:
    """What a replay measured. Seconds and tokens; `errors` holds the first few failures as sentences."""

    goodput: Goodput = field(default_factory=Goodput)
    sessions: int = 0
    completed: int = 0
    failed: int = 0
    good: int = 0
    duration: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    turns_with_cached_tokens: int = 0
    ttft: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    tpot: Samples = field(default_factory=Samples)
    e2el: Samples = field(default_factory=Samples)
    workers: Counter[str] = field(default_factory=Counter)
    answers: GivenAnswers = field(default_factory=GivenAnswers)
    errors: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return self.completed + self.failed

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens that came from a cache; None unless every answer said so."""
        if not self.completed or self.turns_with_cached_tokens < self.completed or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def take(self, answer: Answer) -> None:
        self.completed += 1
        self.good += self.goodput.good(answer)
        self.prompt_tokens += answer.prompt_tokens or 0
        self.output_tokens += answer.output_tokens
        if answer.cached_tokens is not None:
            self.cached_tokens += answer.cached_tokens
            self.turns_with_cached_tokens += 1
        if answer.time_to_first_token is not None:
            self.ttft.add(answer.time_to_first_token)
        if answer.time_per_output_token is not None:
            self.tpot.add(answer.time_per_output_token)
        self.e2el.add(answer.duration)
        self.itl.extend(answer.gaps)
        if answer.worker is not None:
            self.workers[answer.worker] += 1

    def fail(self, session: str, turn: int | None, error: Exception) -> None:
        self.failed += 1
        if len(self.errors) < MAX_ERRORS_KEPT:
            place = f"session {session}" + ("" if turn is None else f", turn {turn}")
            self.errors.append(f"{place}: {error}")


def request_body(turn: RecordedTurn, model: str | None, *, forced: bool) -> dict[str, Any]:
    """The body of a recorded turn. Forced: exactly `output_tokens` tokens (at least one), tools shown but not called.

    `min_tokens` is an extension that vLLM, SGLang and Turnkeep share: it keeps the end of the answer from being chosen
    before. (`ignore_eos` would let it be chosen and go on, which a server that constrains the output cannot always do.)
    A server without it answers freely, up to the recorded length.
    """
    line = turn.line
    body: dict[str, Any] = {"model": model or line.model, "messages": turn.messages}
    if turn.tools:
        body["tools"] = turn.tools
    if not forced:
        return {**body, **{name: value for name, value in line.params.items() if name != "stream_options"}}
    length = max(1, line.output_tokens)
    body |= {name: value for name, value in line.params.items() if name not in UNFORCEABLE}
    body |= {"max_tokens": length, "min_tokens": length}
    if turn.tools:
        body["tool_choice"] = "none"
    return body


class Replay:
    """One run. `result` can be read while it runs; `on_turn` is called after every turn."""

    def __init__(self, config: ReplayConfig, clients: Sequence[ChatClient], on_turn: Callable[[], None] = lambda: None) -> None:
        """Sessions are dealt to `clients` in turn, each staying with its own. Raises ValueError without clients."""
        if not clients:
            raise ValueError("a replay needs at least one server")
        if config.concurrency < 1:
            raise ValueError(f"concurrency is at least 1, not {config.concurrency}")
        self._config = config
        self._clients = clients
        self._on_turn = on_turn
        self.result = ReplayResult(goodput=config.goodput)
        self._started = 0.0

    async def run(self, entries: Sequence[SessionEntry]) -> ReplayResult:
        """Replays every session once. A failed turn is counted, and its session goes on with the recorded history."""
        self._started = time.perf_counter()
        queue = iter(enumerate(entries))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._config.concurrency, len(entries))):
                group.create_task(self._worker(queue))
        self.result.duration = time.perf_counter() - self._started
        return self.result

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    async def _worker(self, queue: Iterator[tuple[int, SessionEntry]]) -> None:
        for number, entry in queue:
            client = self._clients[number % len(self._clients)]
            self.result.sessions += 1
            try:
                await self._session(entry, client)
            except TraceFormatError as error:
                # The file was whole when it was indexed; what is left of the session cannot be sent.
                self.result.fail(entry.session, None, error)
                self._on_turn()

    async def _session(self, entry: SessionEntry, client: ChatClient) -> None:
        turns = entry.read()
        ended: float | None = None
        # Reading and decoding happen on a thread: they must not delay the clocks of other streams.
        while (turn := await asyncio.to_thread(next, turns, None)) is not None:
            if ended is not None:
                gap = turn.line.gap_seconds * self._config.gap_scale
                await asyncio.sleep(max(0.0, ended + gap - time.perf_counter()))
            body = request_body(turn, self._config.model, forced=self._config.forced)
            try:
                answer = await client.chat(body, session=self._config.session_prefix + entry.session)
            except ChatError as error:
                self.result.fail(entry.session, turn.line.turn, error)
            else:
                self.result.take(answer)
                self.result.answers.add(entry.session, turn.line.turn, answer.message)
            ended = time.perf_counter()
            self._on_turn()


def open_http(concurrency: int) -> aiohttp.ClientSession:
    """An HTTP session for that many streams at once; close it after use."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency), read_bufsize=1 << 20)


async def choose_model(client: ChatClient, entries: Sequence[SessionEntry]) -> str:
    """The recorded model where the server has it, else the server's first. Raises ChatError when the server does not answer."""
    names = await client.models()
    recorded = next(entries[0].read()).line.model if entries else None
    return recorded if recorded in names else names[0]
