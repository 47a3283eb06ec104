"""Sessions against an engine on a virtual clock: scheduler, pool and books are the real ones, only the forward pass is not.

What a way of scheduling is worth comes out the same on every machine, in a moment, however busy that is. There are no tiers,
whose threads know no virtual time: the pool stands for all that holds KV.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.bench.offload.replay import Outcome, hint, request_of
from engine.bench.offload.workload import Session
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.interface import StepBatch
from engine.models.registry import LoadedModel
from engine.sampling.sampler import Sampler
from gateway.workers.protocol import Done, Failed, Tokens
from prefix_cache.eviction import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a step takes: `step` in any case, `token` for each token of a prompt, `pair` for each of them and token
    before it, `decode` for each sequence that decodes. The defaults are about those of SmolLM2-135M on two cores."""

    step: float = 0.008
    token: float = 5e-4
    pair: float = 1e-7
    decode: float = 0.002


class VirtualClock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedForward:
    """A `Forward` that computes nothing, and for which the clock goes on as if it had."""

    def __init__(self, vocab_size: int, pace: Pace, clock: VirtualClock) -> None:
        self._vocab_size = vocab_size
        self._pace = pace
        self._clock = clock

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        pace, starts = self._pace, batch.query_start_list
        seconds = pace.step
        for index, context in enumerate(batch.context_lens_list):
            new = starts[index + 1] - starts[index]
            seconds += pace.decode if new == 1 else pace.token * new + pace.pair * new * (context - new / 2)
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
) -> tuple[Outcome, Engine]:
    """What comes of sessions whose engine holds `blocks` blocks, and the engine when all have ended. As `replay` otherwise."""
    clock = VirtualClock()
    longest = max(len(session.prompts[-1]) + session.outputs[-1] for session in sessions) + 1
    engine = Engine(
        config,
        model,
        num_blocks=blocks,
        max_model_len=longest,
        forward=TimedForward(model.spec.vocab_size, pace or Pace(), clock),
        sampler=Sampler(model.spec.vocab_size),
        eviction=eviction,
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
        if not engine.has_work():
            wakes = engine.wakes_in()
            later = [coming[0][0]] if coming else []
            if wakes is not None:
                later.append(clock.now + wakes)
            if not later:
                raise RuntimeError(f"{len(sent)} turns wait and nothing will ever wake them")
            clock.now = max(clock.now, min(later)) if min(later) > clock.now else clock.now + 1e-6
            continue
        for request_id, chunk in engine.step():
            number, turn, at = sent[request_id]
            session = sessions[number]
            if isinstance(chunk, Failed):
                raise RuntimeError(f"{request_id}: {chunk.message}")
            if isinstance(chunk, Tokens) and request_id not in seen:
                seen.add(request_id)
                if turn:
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
    outcome.seconds = clock.now
    outcome.held, outcome.pauses = engine.stats().held_total, engine.stats().pauses_total
    return outcome, engine


def virtual_config(**settings: object) -> EngineConfig:
    """Of an engine whose model is nowhere."""
    return EngineConfig(model=Path("nowhere"), **settings)  # type: ignore[arg-type]
