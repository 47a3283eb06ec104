"""Measures formats of one model one after the other: only one of them is in memory at a time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.checkpoints.cache import default_cache_dir
from engine.checkpoints.gguf_blocks import BLOCKS
from engine.config import ConfigError, EngineConfig
from engine.forward_choice import choose_forward
from engine.loading import load_configured
from engine.models.registry import read_spec
from engine.quality.config import REFERENCE, Bounds, Format, QualityConfig
from engine.quality.drift import Drift, drift, out_of_bounds
from engine.quality.observe import Observation, Subject, observe
from engine.runner import allocate_kv

logger = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]
"""Takes the name of the format that is being measured, tokens done and tokens in all."""

Load = Callable[[EngineConfig, int, Path], Subject]
"""Makes a format ready: its configuration, tokens of the longest context, and where built kernels are kept."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One format. `broken`: the bounds that it does not keep; it is ready when there are none."""

    format: str
    reference: str
    drift: Drift
    bounds: Bounds
    broken: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return not self.broken


def load_subject(config: EngineConfig, context: int, cache_dir: Path) -> Subject:
    """The model and the forward pass that the engine would choose for it. Raises CheckpointError and ConfigError."""
    model = load_configured(config, cache_dir)
    forward = choose_forward(config, model.decoder, cache_dir / "kernels")
    kv = allocate_kv(model, -(-context // config.block_size), config.block_size, config.kv_dtype)
    return Subject(forward, kv, config.block_size)


def formats_of(model: Path, config: QualityConfig) -> tuple[str, ...]:
    """The formats that this model can be served in."""
    return tuple(name for name in config.formats if name != "gguf" or (model / BLOCKS).is_file())


def windows(texts: Sequence[Sequence[int]], model: Path, config: QualityConfig) -> list[list[int]]:
    """Texts cut to what the model's context and `config` hold. Raises ConfigError when nothing is left to predict."""
    size = min(config.window, read_spec(model).max_position)
    cut: list[list[int]] = []
    left = config.max_tokens
    for text in texts:
        for start in range(0, len(text), size):
            part = list(text[start : start + min(size, left)])
            if len(part) > 1:
                cut.append(part)
                left -= len(part)
    if not cut:
        raise ConfigError(f"max_tokens is {config.max_tokens}; at least two tokens of text are needed.")
    return cut


def measure(
    engine: EngineConfig,
    formats: Sequence[str],
    texts: Sequence[Sequence[int]],
    config: QualityConfig,
    *,
    cache_dir: Path | None = None,
    report: Report = lambda name, done, total: None,
    load: Load = load_subject,
) -> Iterator[Verdict]:
    """A verdict for each of `formats`, as it is measured.

    engine: settings common to all (model, threads, kernels). texts: token ids, as `windows` cuts them. Raises ConfigError for a
    format that there is not, CheckpointError for a model that cannot be loaded in one.
    """
    for name in formats:
        if name not in config.formats:
            raise ConfigError(f"there is no format {name}; those there are: {', '.join(config.formats)}.")
    context = max(max(map(len, texts)), config.prompt_tokens + config.generated_tokens)
    directory = cache_dir or default_cache_dir()

    def observed(wanted: Format) -> Observation:
        settings = replace(engine, **wanted.settings)
        with _own_threads():
            subject = load(settings, context, directory)
            return observe(subject, texts, config, lambda done, total: report(wanted.name, done, total))

    references: dict[str, Observation] = {}
    for wanted in sorted((config.formats[name] for name in dict.fromkeys(formats)), key=lambda made: made.name != "bf16"):
        if wanted.reference not in references:
            made = REFERENCE if wanted.reference == REFERENCE.name else config.formats[wanted.reference]
            references[wanted.reference] = observed(made)
        found = observed(wanted)
        gc.collect()
        if any(config.formats[name].reference == wanted.name for name in formats):
            references[wanted.name] = found
        moved = drift(found, references[wanted.reference])
        broken = tuple(out_of_bounds(moved, wanted.bounds))
        for reason in broken:
            logger.warning("%s is not ready: %s.", wanted.name, reason)
        yield Verdict(wanted.name, wanted.reference, moved, wanted.bounds, broken)


@contextmanager
def _own_threads() -> Iterator[None]:
    """A forward pass may take torch's threads for its own; the next one shall find them again."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
