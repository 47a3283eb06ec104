"""Sessions against engines: every turn is sent when the one before has ended and its gap is over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.bench.offload.budget import OutOfTimeError
from engine.bench.offload.workload import Session
from engine.engine import Engine
from engine.output import Addressed
from engine.thread import EngineThread
from gateway.workers.protocol import Done, Failed, GenerateRequest, RetentionHint, SamplingParams, Tokens
from prefix_cache.hashing import pack_tokens

_HALF, _NINE_OF_TEN = 0.69, 2.3  # of an exponential distribution's mean


@dataclass(slots=True)
class Outcome:
    """What came of a replay. Seconds; `computing`: in forward passes; `completions`: of each session from its first turn to its
    last, gaps included. `held`: turns that waited at the door; `pauses`: of sessions."""

    seconds: float = 0.0
    computing: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0
    pauses: int = 0

    def took(self, done: Done) -> None:
        """Adds a turn."""
        self.prompt_tokens += done.prompt_tokens
        self.cached_tokens += done.cached_tokens
        self.generated_tokens += done.completion_tokens

    def completion(self, quantile: float) -> float:
        """Seconds that a session takes."""
        return float(np.quantile(self.completions, quantile)) if self.completions else 0.0

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def first_token(self, quantile: float) -> float:
        """Seconds to the first token, of all turns."""
        return float(np.quantile(self.first_tokens, quantile)) if self.first_tokens else 0.0

    @property
    def mean_completion(self) -> float:
        return float(np.mean(self.completions)) if self.completions else 0.0

    @property
    def rate(self) -> float:
        """Prompt and generated tokens that were asked for, a second."""
        return (self.prompt_tokens + self.generated_tokens) / self.seconds if self.seconds else 0.0


def replay(
    engines: Sequence[Engine],
    sessions: Sequence[Session],
    gap: float,
    *,
    hints: bool,
    move: bool = False,
    timeout: float | None = None,
    on_turn: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Replays sessions on engines, closing those. `gap`: what the mean gap is known to be. `hints`: engines are told of
    sessions and when they are expected back. `move`: a session's turns take turns with the engines, else it stays with one.
    `on_turn` is called with how many turns have ended. Raises OutOfTimeError after `timeout` seconds."""
    return asyncio.run(_replay(engines, sessions, gap, hints, move, timeout, on_turn))


class _TakingTurns:
    """An engine that steps while no other one does: they share their weights and threads."""

    def __init__(self, engine: Engine, lock: threading.Lock) -> None:
        self._engine = engine
        self._lock = lock

    def step(self) -> list[Addressed]:
        with self._lock:
            return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # Said outright, since a protocol is not looked for behind __getattr__ everywhere.

    def on_news(self, callback: Callable[[], None]) -> None:
        self._engine.on_news(callback)

    def wakes_in(self) -> float | None:
        return self._engine.wakes_in()

    def drain(self) -> None:
        self._engine.drain()


async def _replay(
    engines: Sequence[Engine],
    sessions: Sequence[Session],
    gap: float,
    hints: bool,
    move: bool,
    timeout: float | None,
    on_turn: Callable[[int], None],
) -> Outcome:
    outcome = Outcome()
    lock = threading.Lock()
    threads = [EngineThread(_TakingTurns(engine, lock)) for engine in engines]
    for thread in threads:
        await thread.start()
    began = time.perf_counter()
    done = 0
    try:

        async def run(number: int, session: Session) -> None:
            first = None
            for turn, wait in enumerate(session.gaps):
                await asyncio.sleep(wait)
                first = time.perf_counter() if first is None else first
                thread = threads[(number + (turn if move else 0)) % len(threads)]
                request = request_of(session, turn, hints=hints)
                await _turn(thread, request, outcome)
                nonlocal done
                done += 1
                on_turn(done)
                if hints:
                    thread.retain([hint(session.name, request.request_id, gap, is_last=turn == len(session.prompts) - 1)])
            outcome.completions.append(time.perf_counter() - (first or 0.0))

        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(run(number, session) for number, session in enumerate(sessions)))
        except TimeoutError:
            raise OutOfTimeError(f"the budget was spent after {done} turns of a replay") from None
        outcome.seconds = time.perf_counter() - began
        for thread in threads:
            stats = thread.stats()
            outcome.held += stats.held_total
            outcome.pauses += stats.pauses_total
    finally:
        for thread in threads:
            await thread.close()
        for engine in engines:
            outcome.computing += engine.forward_seconds
            await asyncio.to_thread(engine.close)
    return outcome


def request_of(session: Session, turn: int, *, hints: bool) -> GenerateRequest:
    """A turn as a gateway would send it."""
    return GenerateRequest(
        request_id=f"{session.name}-{turn}",
        packed_token_ids=pack_tokens(session.prompts[turn]),
        sampling=SamplingParams(temperature=0.0, max_tokens=session.outputs[turn], ignore_eos=True),
        session=session.name if hints else None,
    )


def hint(session: str, request_id: str, gap: float, *, is_last: bool) -> RetentionHint:
    """What a gateway would say at the end of a turn."""
    if is_last:
        return RetentionHint(session=session, request_id=request_id, state="closed")
    return RetentionHint(session=session, request_id=request_id, return_p50=_HALF * gap, return_p90=_NINE_OF_TEN * gap)


async def _turn(thread: EngineThread, request: GenerateRequest, outcome: Outcome) -> None:
    sent = time.perf_counter()
    stream = await thread.submit(request)
    first = None
    while chunks := await stream.read():
        for chunk in chunks:
            if isinstance(chunk, Tokens) and first is None:
                first = time.perf_counter() - sent
            elif isinstance(chunk, Failed):
                raise RuntimeError(f"{request.request_id}: {chunk.message}")
            elif isinstance(chunk, Done):
                outcome.took(chunk)
    if first is not None:
        outcome.first_tokens.append(first)
