"""Runs the works: the sides take turns, and the medians of their turns are compared with the roofline and with each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.bench.machine import Machine
from engine.bench.processor import busy_seconds
from engine.bench.roofline import Precision, roofline
from engine.bench.sides import OwnSide, PeerSide, Side
from engine.bench.works import Work
from engine.models.spec import ModelSpec

Progress = Callable[[str, int, int], None]
"""Told before each turn: what, how many turns of the work are done, how many it has."""

_FIRST_ID = 10
"""Ids below are often special tokens."""

_CLOCK_TICKS = 0.03
"""Processor time is counted in hundredths of a second: less than a few of them is noise."""

OVERHEAD_BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second over the turns of one side."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def spread(self) -> float:
        """From the slowest to the fastest turn, as a share of the median."""
        return (max(self.turns) - min(self.turns)) / self.median


@dataclass(frozen=True, slots=True)
class Row:
    """One work's outcome. roofline: tokens a second; bound: memory, or the instruction that the linear layers would use.
    disturbance: the largest share of a processor that a side used during another's turn; foreign: that all processes beside the
    sides used during a turn, the mean over the turns."""

    work: Work
    own: Rate
    peers: dict[str, Rate]
    roofline: float
    bound: str
    disturbance: float
    foreign: float

    @property
    def share(self) -> float:
        """Of the roofline."""
        return self.own.median / self.roofline

    def ratio(self, peer: str) -> float:
        """This engine's median over the peer's."""
        return self.own.median / self.peers[peer].median


@dataclass(frozen=True, slots=True)
class Overhead:
    """A decode step's time beside its forward pass, and the whole step; medians, in seconds."""

    batch: int
    overhead: float
    step: float


def measure(
    works: Sequence[Work],
    own: OwnSide,
    peers: Sequence[PeerSide],
    *,
    repeats: int,
    budget: int,
    spec: ModelSpec,
    precision: Precision,
    machine: Callable[[], Machine],
    progress: Progress,
    seed: int,
) -> tuple[list[Row], list[Overhead]]:
    """Every work in turn. `budget`: tokens of a step of the engine. `machine` is called when all works are done: the machine is
    measured again then, and the better figures are the roofline's."""
    generator = torch.Generator().manual_seed(seed)
    sides: list[Side] = [own, *peers]
    outcomes: list[tuple[Work, _Turns]] = []
    overheads: list[Overhead] = []
    for work in works:
        shape = [length for length, _ in work.requests]

        def prompts(shape: list[int] = shape) -> list[list[int]]:
            drawn = [
                torch.randint(min(_FIRST_ID, spec.vocab_size - 1), spec.vocab_size, (n,), generator=generator) for n in shape
            ]
            return [ids.tolist() for ids in drawn]

        own.times.steps.clear()
        own.times.forward.clear()
        turns = _Turns(sides, progress, work, repeats, budget)
        if work.kind == "decode":
            turns.decode(prompts())
            batch = len(shape)
            known = {overhead.batch for overhead in overheads}
            if batch in OVERHEAD_BATCHES and batch not in known:
                timed = own.times.overheads()[work.steps :], own.times.steps[work.steps :]  # without the turn that warms up
                overheads.append(Overhead(batch, statistics.median(timed[0]), statistics.median(timed[1])))
        else:
            turns.run(prompts)
        outcomes.append((work, turns))
    measured = machine()
    rows = []
    for work, turns in outcomes:
        rates = {name: Rate(tuple(work.tokens / taken for taken in times)) for name, times in turns.seconds.items()}
        # Decode's context grows from turn to turn; the middle one stands for the median.
        least = roofline(work.plan(budget, turn=1 + repeats // 2), spec, precision, measured)
        bound = "memory" if least.memory_share > 0.5 else least.instruction
        own_rate = rates.pop(own.name)
        rows.append(Row(work, own_rate, rates, work.tokens / least.seconds, bound, turns.disturbance, turns.foreign))
    return rows, overheads


class _Turns:
    """One work's turns. The first round warms up and is not kept."""

    def __init__(self, sides: Sequence[Side], progress: Progress, work: Work, repeats: int, budget: int) -> None:
        self.seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        self.disturbance = 0.0
        self._foreign_seconds = 0.0
        self._sides = sides
        self._progress = progress
        self._work = work
        self._repeats = repeats
        self._budget = budget
        self._done = 0

    def run(self, prompts: Callable[[], list[list[int]]]) -> None:
        """From end to end, with other prompts in every round."""
        tokens = [count for _, count in self._work.requests]
        for turn in range(self._repeats + 1):
            drawn = prompts()
            for side in self._sides:
                self._turn(side, turn, lambda side=side, drawn=drawn: side.run(drawn, tokens))  # type: ignore[misc]

    def decode(self, prompts: list[list[int]]) -> None:
        """Each side computes the prompts once; then they take turns of `steps` steps."""
        steps = self._work.steps
        prompt = max(length for length, _ in self._work.requests)
        room = self._work.room(prompt, 0, self._repeats, self._budget) - prompt
        for side in self._sides:
            self._progress(f"{self._work.name}: {side.name}, prompts", 0, self._total)
            side.begin(prompts, room)
        for turn in range(self._repeats + 1):
            for side in self._sides:
                self._turn(side, turn, lambda side=side: side.decode(steps))  # type: ignore[misc]
        for side in self._sides:
            side.end()

    @property
    def foreign(self) -> float:
        """Share of a processor that processes beside the sides used during the turns that count."""
        taken = sum(sum(times) for times in self.seconds.values())
        return max(0.0, self._foreign_seconds) / taken

    @property
    def _total(self) -> int:
        return (self._repeats + 1) * len(self._sides)

    def _turn(self, side: Side, turn: int, call: Callable[[], float]) -> None:
        self._progress(f"{self._work.name}: {side.name}", self._done, self._total)
        self._done += 1
        before, busy = [any_side.cpu_seconds() for any_side in self._sides], busy_seconds()
        seconds = call()
        all_used = [any_side.cpu_seconds() - then for any_side, then in zip(self._sides, before, strict=True)]
        foreign = busy_seconds() - busy - sum(all_used)
        used = [taken for taken, other in zip(all_used, self._sides, strict=True) if other is not side]
        if turn:
            self.seconds[side.name].append(seconds)
            self._foreign_seconds += foreign
            self.disturbance = max(self.disturbance, *(taken / seconds for taken in used if taken >= _CLOCK_TICKS), 0.0)
