"""Measures on one engine at a time: what stores cost those that run, and what a restart costs a turn."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from engine.bench.offload.budget import Budget
from engine.bench.offload.engines import Engines
from engine.bench.offload.report import OffloadBench, OffloadReport
from engine.engine import Engine
from engine.output import Addressed
from gateway.workers.protocol import GenerateRequest, SamplingParams, Started, Tokens
from offload.config import OffloadConfig
from prefix_cache.hashing import pack_tokens

_MOMENT = 0.0005
_FIRST = 64
"""Tokens of the prompt that is not measured."""


def measure_stores(engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, budget: Budget) -> None:
    """Tokens a second of four sequences that decode, with and without a host tier, taking turns; the median of each."""
    length = 256 + bench.decode_tokens
    blocks = 4 * (length // engines.block_size + 2)
    rates: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    for repeat in range(bench.repeats):
        if repeat and budget.is_over:
            break  # fewer repeats are a measure all the same
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
        engine.add(engine.prepare(_request(f"r{number}", random_ids(engine.info.vocab_size, 256, 10 * seed + number), tokens)))
    made = 0
    began: float | None = None
    while engine.has_work() or engine.stats().loading:
        count = sum(len(chunk.token_ids) for _, chunk in _step(engine) if isinstance(chunk, Tokens))
        if began is None and count == 4:
            began = time.perf_counter()
        elif began is not None:
            made += count
    return made / (time.perf_counter() - (began or 0.0))


def measure_restart(
    engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, below: Path, budget: Budget
) -> None:
    """Time to the first token of a turn on a replica that was just started: computed, and loaded from disk; medians."""
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
        if repeat and budget.is_over:
            break  # fewer repeats are a measure all the same
        for times in (computed, loaded):
            engine = engines.make(blocks, max(bench.turn_tokens, _FIRST) + 8, offload)
            try:
                first_token(engine, random_ids(engine.info.vocab_size, _FIRST, 1000 + repeat))  # as any replica has had one
                seconds, cached = first_token(engine, random_ids(engine.info.vocab_size, bench.turn_tokens, 77 + repeat))
                times.append(seconds)
            finally:
                engine.close()
        report.restart_cached = cached
    report.restart_computed, report.restart_loaded = float(np.median(computed)), float(np.median(loaded))


def first_token(engine: Engine, ids: npt.NDArray[np.uint32]) -> tuple[float, int]:
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


def _request(name: str, ids: npt.NDArray[np.uint32], tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        packed_token_ids=pack_tokens(ids),
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
    )


def random_ids(vocab_size: int, count: int, seed: int) -> npt.NDArray[np.uint32]:
    """uint32 [count]: a prompt of no meaning, the same for the same seed."""
    return np.random.default_rng(seed).integers(100, vocab_size - 100, count).astype(np.uint32)
