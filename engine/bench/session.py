"""One run of the benchmark: settings in, report out."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.bench.machine import measure_machine
from engine.bench.measure import Progress, measure
from engine.bench.report import Report
from engine.bench.roofline import Precision
from engine.bench.sides import OwnSide, PeerConfig, PeerSide
from engine.bench.works import Work, standard_works
from engine.checkpoints.gguf_blocks import BLOCKS
from engine.config import ConfigError, DTypeName, EngineConfig
from engine.loading import load_engine, resolve_dtype
from engine.models.registry import read_spec
from prefix_cache.hashing import DEFAULT_BLOCK_SIZE

_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as asked for: kind; model (None: the engine's own directory); python (None: this one); options of its driver."""

    kind: str
    model: Path | None = None
    python: str | None = None
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """model: a directory. dtype, quantization, kv_dtype, max_num_batched_tokens: as the engine has them (None: its default).
    only: a regular expression; the works in whose names it is found are run."""

    model: Path
    cache_dir: Path
    dtype: DTypeName = "auto"
    quantization: str = "none"
    kv_dtype: DTypeName = "auto"
    threads: int | None = None
    max_num_batched_tokens: int | None = None
    repeats: int = 5
    only: str = ""
    seed: int = 0
    peers: Sequence[Peer] = ()


def run_bench(config: BenchConfig, progress: Progress) -> Report:
    """Raises ConfigError for settings that cannot work, CheckpointError for a model and PeerError for a peer."""
    threads = config.threads or torch.get_num_threads()
    spec = read_spec(config.model)
    works = _chosen(standard_works(spec.max_position), config.only)
    engine_config = _engine_config(config, threads, works)
    dtype = str(resolve_dtype(engine_config)).removeprefix("torch.")
    precision = Precision.of(dtype, config.quantization, config.kv_dtype, _gguf_bytes(config))
    with contextlib.ExitStack() as stack:
        progress("machine", 0, 1)
        machine = measure_machine(threads, config.cache_dir / "kernels")
        peers = []
        for peer in config.peers:  # before our own: one that is not there is known at once
            progress(f"{peer.kind}, loading", 0, 1)
            given = {} if peer.python is None else {"python": peer.python}
            model = peer.model or config.model
            started = PeerSide(
                PeerConfig(peer.kind, model, threads, dtype, spec.vocab_size, options=dict(peer.options), **given)
            )
            peers.append(started)
            stack.callback(started.close)
        progress("engine, loading", 0, 1)
        own = OwnSide(load_engine(engine_config, cache_dir=config.cache_dir))
        stack.callback(own.close)
        budget = engine_config.max_num_batched_tokens

        def again() -> Any:
            nonlocal machine
            progress("machine", 0, 1)
            machine = machine.better(measure_machine(threads, config.cache_dir / "kernels"))
            return machine

        rows, overheads = measure(
            works,
            own,
            peers,
            repeats=config.repeats,
            budget=budget,
            spec=spec,
            precision=precision,
            machine=again,
            progress=progress,
            seed=config.seed,
        )
    settings = {
        "model": config.model.name,
        "dtype": dtype,
        "quantization": config.quantization,
        "kv_dtype": precision.kv,
        "threads": threads,
        "max_num_batched_tokens": budget,
        "repeats": config.repeats,
    }
    named = {peer.name: {"version": peer.version, "settings": peer.settings} for peer in peers}
    return Report(settings, machine, named, rows, overheads)


def _chosen(works: list[Work], only: str) -> list[Work]:
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ConfigError(f"only is {only!r}, which is no regular expression: {error}.") from error
    chosen = [work for work in works if pattern.search(work.name)]
    if not chosen:
        names = ", ".join(work.name for work in works)
        raise ConfigError(f"only is {only!r}, which is found in the name of no work; they are: {names}.")
    return chosen


def _engine_config(config: BenchConfig, threads: int, works: Sequence[Work]) -> EngineConfig:
    budget = config.max_num_batched_tokens or EngineConfig(model=config.model).max_num_batched_tokens
    rooms = [[work.room(length, count, config.repeats, budget) for length, count in work.requests] for work in works]
    blocks = max(sum(-(-room // DEFAULT_BLOCK_SIZE) for room in row) for row in rooms)
    longest = max(max(row) for row in rooms)
    given: dict[str, Any] = {}
    known = {known.name for known in dataclasses.fields(EngineConfig)}
    for name, plain in (("quantization", "none"), ("kv_dtype", "auto")):
        if name in known:
            given[name] = getattr(config, name)
        elif getattr(config, name) != plain:
            raise ConfigError(f"{name} is {getattr(config, name)!r}, which this engine does not have; leave it at {plain}.")
    if config.max_num_batched_tokens is not None:
        given["max_num_batched_tokens"] = config.max_num_batched_tokens
    return EngineConfig(
        model=config.model,
        dtype=config.dtype,
        block_size=DEFAULT_BLOCK_SIZE,
        num_blocks=blocks + 1,
        max_model_len=longest + 1,
        max_num_seqs=_SEQUENCES,
        prefix_caching=False,
        # A token a pass, as the peers and the roofline count: random prompts say nothing of how often guesses come true.
        max_draft_tokens=0,
        threads=threads,
        **given,
    )


def _gguf_bytes(config: BenchConfig) -> int | None:
    """Of the blocks that quantization gguf reads; None for other formats."""
    if config.quantization != "gguf":
        return None
    blocks = config.model / BLOCKS
    return blocks.stat().st_size if blocks.is_file() else None
