"""Load or recompute: the same turns with a disk tier whose medium is as slow as we say, and computed again without any.

Both sides take each turn one right after the other, in turns first, so that a machine that is busy with something else is busy
for both. Only the medium's delay is made up: reads of the disk tier's file, and what is decided about them, are real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.bench.offload.budget import Budget
from engine.bench.offload.engines import Engines
from engine.bench.offload.report import OffloadBench, OffloadReport, WorthRow
from engine.bench.offload.single import first_token, random_ids
from engine.engine import Engine
from offload.checksum import Bytes
from offload.config import OffloadConfig
from offload.files import Files

_SESSIONS = 3
_SHARE = 12
"""Of `turn_tokens` is a session's first prompt; it grows by a fourth of that from turn to turn."""
_LEAST = 128
_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class Medium:
    """`delay`: of the read of a number, counted from 0, beside what it takes anyhow; in what computing a block takes."""

    name: str
    delay: Callable[[int], float]


MEDIA = (
    Medium("disk as it is", lambda read: 0.0),
    Medium("as slow as computing", lambda read: 1.0),
    Medium("four times as slow", lambda read: 4.0),
    Medium("stands still now and then", lambda read: 10.0 if read % 96 >= 64 else 0.0),
)


class SlowFiles(Files):
    """Reads that take longer; from any thread."""

    def __init__(self, delay: Callable[[int], float]) -> None:
        """delay: seconds of a read, by its number."""
        self._delay = delay
        self._reads = 0
        self._lock = threading.Lock()

    def read_into(self, descriptor: int, into: Bytes, offset: int) -> int:
        with self._lock:
            number = self._reads
            self._reads += 1
        time.sleep(self._delay(number))
        return super().read_into(descriptor, into, offset)


def measure_worth(
    engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, below: Path, budget: Budget
) -> None:
    """One row for each of MEDIA. The pool holds one session; who comes back finds its blocks on disk, or nowhere."""
    prompts = _prompts(engines, max(_LEAST, bench.turn_tokens // _SHARE), 2 + bench.repeats)
    longest = len(prompts[0][-1]) + 8
    blocks = longest // engines.block_size + 4
    block_seconds: float | None = None
    for medium in MEDIA:
        budget.began(f"load or recompute: {medium.name}")
        plain = engines.make(blocks, longest, policy="fcfs")
        try:
            if block_seconds is None:
                block_seconds = _block_seconds(plain, prompts, engines.block_size)
            tiered = _with_disk(engines, blocks, longest, shared, below / medium.name.replace(" ", "-"), medium, block_seconds)
            try:
                report.worth.append(_compared(medium.name, block_seconds, plain, tiered, prompts, budget))
            finally:
                tiered.close()
        finally:
            plain.close()


def _with_disk(
    engines: Engines, blocks: int, longest: int, shared: Path, below: Path, medium: Medium, block_seconds: float
) -> Engine:
    """An engine whose blocks all stay on a disk of this kind."""
    below.mkdir()
    offload = OffloadConfig(
        disk=below, disk_bytes=4 * _SESSIONS * blocks * engines.block_bytes, disk_min_free=0, shared_memory=shared
    )
    files = SlowFiles(lambda read: medium.delay(read) * block_seconds)
    return engines.make(blocks, longest, offload, policy="fcfs", files=files)


def _prompts(engines: Engines, length: int, turns: int) -> list[list[npt.NDArray[np.uint32]]]:
    """By session and turn; each begins with the one before."""
    ends = [length + turn * max(engines.block_size, length // 4) for turn in range(turns)]
    return [
        [ids[:end] for end in ends] for ids in (random_ids(engines.vocab_size, ends[-1], 500 + n) for n in range(_SESSIONS))
    ]


def _block_seconds(engine: Engine, prompts: Sequence[Sequence[npt.NDArray[np.uint32]]], block_size: int) -> float:
    """What computing a block takes. The first prompt only wakes the threads."""
    seconds = [first_token(engine, turns[0])[0] * block_size / len(turns[0]) for turns in prompts]
    return float(np.median(seconds[1:]))


def _compared(
    name: str,
    block_seconds: float,
    plain: Engine,
    tiered: Engine,
    prompts: Sequence[Sequence[npt.NDArray[np.uint32]]],
    budget: Budget,
) -> WorthRow:
    """Later turns of all sessions; first turns have nothing to load, and only fill the disk."""
    computed: list[float] = []
    loaded: list[float] = []
    cached = tokens = 0
    for turn in range(len(prompts[0])):
        for number, session in enumerate(prompts):
            budget.check()
            prompt = session[turn]
            for engine in (plain, tiered) if (turn + number) % 2 else (tiered, plain):
                seconds, found = first_token(engine, prompt)
                # What is still to be written would slow down whoever is next.
                engine.wait_for_tiers(_WAIT)
                if turn:
                    (computed if engine is plain else loaded).append(seconds)
                    cached += found if engine is tiered else 0
                    tokens += len(prompt) if engine is tiered else 0
    return WorthRow(
        medium=name,
        computing_a_block=block_seconds,
        turns=len(loaded),
        computed_p50=float(np.median(computed)),
        computed_mean=float(np.mean(computed)),
        tiers_p50=float(np.median(loaded)),
        tiers_mean=float(np.mean(loaded)),
        loaded_share=cached / tokens,
    )
