"""The measures of `turnkeep bench offload`, one after the other, each side taking its turn on the same sessions."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from engine.bench.offload.engines import Engines
from engine.bench.offload.rates import Rates, measure_rates
from engine.bench.offload.replay import Outcome, replay
from engine.bench.offload.workload import Session, largest, working_set
from engine.engine import Engine
from engine.output import Addressed
from gateway.workers.protocol import GenerateRequest, SamplingParams, Started, Tokens
from offload.arena import SHARED_MEMORY
from offload.config import OffloadConfig
from prefix_cache.eviction import LRUPolicy
from prefix_cache.hashing import pack_tokens

_MOMENT = 0.0005
_FIRST = 64
"""Tokens of the prompt that is not measured."""

Progress = Callable[[str], None]

MEASURES = ("rates", "stores", "restart", "pools", "shared")


@dataclass(frozen=True, slots=True)
class OffloadBench:
    """What is measured and with what. `shares`: of the working set that the pool holds. Times in seconds."""

    directory: Path
    sessions: Sequence[Session]
    gap: float
    shares: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    turn_tokens: int = 6000
    decode_tokens: int = 128
    repeats: int = 3
    rate_bytes: int = 512 << 20
    measures: tuple[str, ...] = MEASURES


@dataclass(slots=True)
class PoolRow:
    """One side with one pool."""

    share: float
    side: str
    blocks: int
    first_token_p50: float
    first_token_p99: float
    mean_completion: float
    tokens_per_second: float
    cached_share: float


@dataclass(slots=True)
class OffloadReport:
    """Every figure was measured in this run; None: not asked for."""

    block_bytes: int
    working_set: int
    rates: Rates | None = None
    decode_with_stores: float | None = None
    decode_without: float | None = None
    store_processor_share: float | None = None
    restart_computed: float | None = None
    restart_loaded: float | None = None
    restart_cached: int | None = None
    unlimited: PoolRow | None = None
    pools: list[PoolRow] = field(default_factory=list)
    shared_arena: float | None = None
    private_arenas: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_offload_bench(engines: Engines, bench: OffloadBench, progress: Progress) -> OffloadReport:
    """Runs it. Leaves nothing in shared memory or in the directory."""
    size = engines.block_size
    report = OffloadReport(engines.block_bytes, working_set(bench.sessions, size))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared, tempfile.TemporaryDirectory(dir=bench.directory) as below:
        works: dict[str, Callable[[], None]] = {
            "rates": lambda: _rates(engines, bench, report),
            "stores": lambda: _stores(engines, bench, report, Path(shared)),
            "restart": lambda: _restart(engines, bench, report, Path(shared), Path(below)),
            "pools": lambda: _pools(engines, bench, report, Path(shared), progress),
            "shared": lambda: _shared(engines, bench, report, Path(shared)),
        }
        for name in bench.measures:
            progress(name)
            works[name]()
    return report


def _rates(engines: Engines, bench: OffloadBench, report: OffloadReport) -> None:
    blocks = max(16, bench.rate_bytes // engines.block_bytes)
    report.rates = measure_rates(engines.block_bytes, blocks, bench.directory)


def _stores(engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path) -> None:
    """Tokens a second of four sequences that decode, with and without a host tier, taking turns; the median of each."""
    length = 256 + bench.decode_tokens
    blocks = 4 * (length // engines.block_size + 2)
    rates: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    for repeat in range(bench.repeats):
        for stores in (True, False) if repeat % 2 else (False, True):
            offload = OffloadConfig(host_bytes=4 * blocks * engines.block_bytes, shared_memory=shared) if stores else None
            engine = engines.make(blocks, length + 1, offload)
            try:
                before = time.process_time(), _transfer_seconds()
                rates[stores].append(_decode_rate(engine, bench.decode_tokens, seed=repeat))
                if stores:
                    shares.append((_transfer_seconds() - before[1]) / (time.process_time() - before[0]))
            finally:
                engine.close()
    report.store_processor_share = float(np.median(shares))
    report.decode_with_stores, report.decode_without = float(np.median(rates[True])), float(np.median(rates[False]))


def _transfer_seconds() -> float:
    """Processor seconds of the threads that move blocks, of this process, so far."""
    names = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("kv-")}
    return float(sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in names))


def _decode_rate(engine: Engine, tokens: int, seed: int) -> float:
    for number in range(4):
        engine.add(engine.prepare(_request(f"r{number}", _ids(engine, 256, 10 * seed + number), tokens)))
    made = 0
    began: float | None = None
    while engine.has_work() or engine.stats().loading:
        count = sum(len(chunk.token_ids) for _, chunk in _step(engine) if isinstance(chunk, Tokens))
        if began is None and count == 4:
            began = time.perf_counter()
        elif began is not None:
            made += count
    return made / (time.perf_counter() - (began or 0.0))


def _restart(engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, below: Path) -> None:
    # Room for the prompt that comes first, so that nothing of the turn has to go for it.
    blocks = (bench.turn_tokens + _FIRST) // engines.block_size + 8
    offload = OffloadConfig(
        host_bytes=2 * blocks * engines.block_bytes,
        disk=below,
        disk_bytes=2 * blocks * engines.block_bytes,
        disk_min_free=0,
        shared_memory=shared,
    )
    computed: list[float] = []
    loaded: list[float] = []
    for repeat in range(bench.repeats):
        for times in (computed, loaded):
            engine = engines.make(blocks, max(bench.turn_tokens, _FIRST) + 8, offload)
            try:
                _first_token(engine, _ids(engine, _FIRST, 1000 + repeat))  # as any replica has had one
                seconds, cached = _first_token(engine, _ids(engine, bench.turn_tokens, 77 + repeat))
                times.append(seconds)
            finally:
                engine.close()
        report.restart_cached = cached
    report.restart_computed, report.restart_loaded = float(np.median(computed)), float(np.median(loaded))


def _first_token(engine: Engine, ids: npt.NDArray[np.uint32]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were not computed."""
    began = time.perf_counter()
    engine.add(engine.prepare(_request("turn", ids, 1)))
    cached = 0
    while True:
        for _, chunk in _step(engine):
            if isinstance(chunk, Started):
                cached = chunk.cached_tokens
            elif isinstance(chunk, Tokens):
                seconds = time.perf_counter() - began
                while engine.has_work():
                    engine.step()
                return seconds, cached


def _step(engine: Engine) -> list[Addressed]:
    """A step, or a moment's wait for blocks that are being loaded."""
    if not engine.has_work():
        time.sleep(_MOMENT)
    return engine.step()


def _pools(engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, progress: Progress) -> None:
    size = engines.block_size
    least, longest = largest(bench.sessions, size), max(len(session.prompts[-1]) for session in bench.sessions) + 64
    whole = report.working_set + report.working_set // 8 + least

    def row(share: float, side: str, blocks: int, outcome: Outcome) -> PoolRow:
        return PoolRow(
            share,
            side,
            blocks,
            outcome.first_token(0.5),
            outcome.first_token(0.99),
            outcome.mean_completion,
            outcome.rate,
            outcome.cached_share,
        )

    progress("pools: unlimited")
    report.unlimited = row(
        0.0, "unlimited", whole, replay([engines.make(whole, longest)], bench.sessions, bench.gap, hints=True)
    )
    for share in bench.shares:
        blocks = max(least, int(share * report.working_set))
        progress(f"pools: {share:g} of the working set, computed again")
        plain = replay([engines.make(blocks, longest, eviction=LRUPolicy())], bench.sessions, bench.gap, hints=False)
        report.pools.append(row(share, "LRU, computed again", blocks, plain))
        progress(f"pools: {share:g} of the working set, with tiers")
        offload = OffloadConfig(host_bytes=2 * whole * engines.block_bytes, shared_memory=shared)
        tiers = replay([engines.make(blocks, longest, offload)], bench.sessions, bench.gap, hints=True)
        report.pools.append(row(share, "host tier", blocks, tiers))


def _shared(engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path) -> None:
    """Two replicas whose sessions move between them at each turn: one arena of a size, or two of half of it."""
    size = engines.block_size
    least, longest = largest(bench.sessions, size), max(len(session.prompts[-1]) for session in bench.sessions) + 64
    blocks = max(least, report.working_set // 8)
    arena = max(2, report.working_set) * engines.block_bytes
    shares = []
    for folders, each in ((("one", "one"), arena), (("left", "right"), arena // 2)):
        made = []
        for folder in folders:
            (shared / folder).mkdir(exist_ok=True)
            made.append(engines.make(blocks, longest, OffloadConfig(host_bytes=each, shared_memory=shared / folder)))
        shares.append(replay(made, bench.sessions, bench.gap, hints=True, move=True).cached_share)
    report.shared_arena, report.private_arenas = shares


def _request(name: str, ids: npt.NDArray[np.uint32], tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        packed_token_ids=pack_tokens(ids),
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
    )


def _ids(engine: Engine, count: int, seed: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(100, engine.info.vocab_size - 100, count).astype(np.uint32)
