"""Sessions against an engine on a virtual clock: scheduler, pool and books are the real ones, only the forward pass is not.

What a way of scheduling is worth comes out the same on every machine, in a moment, however busy that is. Without virtual tiers
(engine.bench.offload.virtual_tiers) the pool stands for all that holds KV.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.bench.offload.replay import Outcome, hint, request_of
from engine.bench.offload.virtual_tiers import VirtualTiers
from engine.bench.offload.workload import Session
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.interface import StepBatch
from engine.models.registry import LoadedModel
from engine.sampling.sampler import Sampler
from gateway.workers.protocol import Done, Failed, Tokens
from prefix_cache.eviction import EvictionPolicy

_LOOKS_EVERY = 0.05
"""Seconds, as `offload.keeper` does while somebody waits for blocks."""


def stand_in_prompts(additions: Sequence[str]) -> list[np.ndarray]:
    """The prompts of a session whose turns each add a text: ids of about as many tokens as it has, equal for equal beginnings.
    On a virtual clock nobody reads them."""
    ids: list[int] = []
    prompts = []
    for text in additions:
        data = text.encode()
        ids.extend(3 + sum(data[at : at + 4]) % 300 for at in range(0, len(data), 4))
        prompts.append(np.array(ids, dtype=np.uint32))
    return prompts


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a step takes: `step` in any case, `token` for each token of a prompt, `pair` for each of them and token
    before it, `decode` for each sequence that decodes. What moves blocks meanwhile takes one of `cores`. The defaults are about
    those of SmolLM2-135M on two cores."""

    step: float = 0.008
    token: float = 5e-4
    pair: float = 1e-7
    decode: float = 0.002
    cores: int = 2


class VirtualClock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedForward:
    """A `Forward` that computes nothing, and for which the clock goes on as if it had."""

    def __init__(self, vocab_size: int, pace: Pace, clock: VirtualClock, tiers: VirtualTiers | None = None) -> None:
        self.seconds = 0.0
        self._vocab_size = vocab_size
        self._pace = pace
        self._clock = clock
        self._tiers = tiers

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        pace, starts = self._pace, batch.query_start_list
        seconds = pace.step
        for index, context in enumerate(batch.context_lens_list):
            new = starts[index + 1] - starts[index]
            seconds += pace.decode if new == 1 else pace.token * new + pace.pair * new * (context - new / 2)
        if self._tiers is not None:
            seconds += min(self._tiers.transfers.take_busy(), seconds) / pace.cores
        self.seconds += seconds
        self._clock.now += seconds
        return torch.zeros((len(rows), self._vocab_size))


def replay_virtually(
    model: LoadedModel,
    sessions: Sequence[Session],
    gap: float,
    config: EngineConfig,
    *,
    blocks: int,
    hints: bool,
    pace: Pace | None = None,
    eviction: EvictionPolicy | None = None,
    make_tiers: Callable[[VirtualClock], VirtualTiers] | None = None,
) -> tuple[Outcome, Engine]:
    """What comes of sessions whose engine holds `blocks` blocks, and the engine when all have ended. As `replay` otherwise."""
    clock = VirtualClock()
    tiers = None if make_tiers is None else make_tiers(clock)
    forward = TimedForward(model.spec.vocab_size, pace or Pace(), clock, tiers)
    longest = max(len(session.prompts[-1]) + session.outputs[-1] for session in sessions) + 1
    engine = Engine(
        config,
        model,
        num_blocks=blocks,
        max_model_len=longest,
        forward=forward,
        sampler=Sampler(model.spec.vocab_size),
        eviction=eviction,
        tiers=tiers,
        clock=clock,
    )
    outcome = Outcome()
    coming = [(session.gaps[0], number, 0) for number, session in enumerate(sessions)]
    heapq.heapify(coming)
    sent: dict[str, tuple[int, int, float]] = {}
    first_sent: dict[int, float] = {}
    seen: set[str] = set()
    while coming or sent:
        while coming and coming[0][0] <= clock.now:
            at, number, turn = heapq.heappop(coming)
            request = request_of(sessions[number], turn, hints=hints)
            sent[request.request_id] = number, turn, at
            first_sent.setdefault(number, at)
            engine.add(engine.prepare(request))
        before = clock.now
        produced = engine.step() if engine.has_work() else []
        if not produced and clock.now == before:
            # Nothing to compute: it waits for somebody to come, for its door or a fetch, or for blocks that are loaded.
            waits = [coming[0][0] - before] if coming else []
            waits += [
                wait for wait in (engine.wakes_in(), None if tiers is None else tiers.transfers.due_in()) if wait is not None
            ]
            if engine.stats().loading:
                waits.append(_LOOKS_EVERY)
            if not waits:
                raise RuntimeError(f"{len(sent)} turns wait and nothing will ever wake them")
            clock.now += max(1e-6, min(waits))
        for request_id, chunk in produced:
            number, turn, at = sent[request_id]
            session = sessions[number]
            if isinstance(chunk, Failed):
                raise RuntimeError(f"{request_id}: {chunk.message}")
            if isinstance(chunk, Tokens) and request_id not in seen:
                seen.add(request_id)
                outcome.first_tokens.append(clock.now - at)
            if not isinstance(chunk, Done):
                continue
            del sent[request_id]
            outcome.took(chunk)
            is_last = turn == len(session.prompts) - 1
            if hints:
                engine.retain([hint(session.name, request_id, gap, is_last=is_last)])
            if is_last:
                outcome.completions.append(clock.now - first_sent[number])
            else:
                heapq.heappush(coming, (clock.now + session.gaps[turn + 1], number, turn + 1))
    outcome.seconds, outcome.computing = clock.now, forward.seconds
    outcome.held, outcome.pauses = engine.stats().held_total, engine.stats().pauses_total
    return outcome, engine


def virtual_config(**settings: object) -> EngineConfig:
    """Of an engine whose model is nowhere."""
    return EngineConfig(model=Path("nowhere"), **settings)  # type: ignore[arg-type]
