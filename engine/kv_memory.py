"""How many KV blocks the engine gets: from a setting, or from the memory that is left beside its largest step."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import torch

from engine.batch import single_batch
from engine.config import ConfigError, EngineConfig
from engine.forward import Forward
from engine.kv_layout import KVLayout
from engine.measurements import Measurements
from engine.memory import available_memory, peak_growth
from engine.models.registry import LoadedModel
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

logger = logging.getLogger(__name__)

PROFILED_CONTEXT = 8192
"""The largest step is measured over a context of this length at most; what a longer one adds is computed."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The size of the pool, and where it comes from (a sentence for the log)."""

    num_blocks: int
    block_bytes: int
    origin: str

    def describe(self, block_size: int, max_model_len: int) -> str:
        """The log line: blocks, tokens and full-length sequences that fit."""
        tokens = self.num_blocks * block_size
        return (
            f"KV memory: {self.num_blocks} blocks of {block_size} tokens = {tokens} tokens = "
            f"{tokens / max_model_len:.1f} sequences of {max_model_len} tokens; "
            f"{self.num_blocks * self.block_bytes / GIB:.2f} GiB, {self.origin}"
        )


def kv_budget(
    config: EngineConfig, model: LoadedModel, forward: Forward, sampler: Sampler, measurements: Measurements | None = None
) -> KVBudget:
    """Decides on the number of blocks, running the largest step once where memory has to be measured and `measurements` do not
    know it from an earlier start.

    Raises ConfigError when not even one block fits.
    """
    layout = KVLayout.of(model, config.block_size, config.kv_dtype)
    block_bytes = layout.block_bytes
    if config.num_blocks is not None:
        return KVBudget(config.num_blocks, block_bytes, "as num_blocks says")
    if config.kv_memory_bytes is not None:
        budget, origin = config.kv_memory_bytes, f"as kv_memory_bytes says ({config.kv_memory_bytes / GIB:.2f} GiB)"
        remedy = f"kv_memory_bytes is {config.kv_memory_bytes}; raise it to at least {block_bytes}"
    else:
        if torch.device(config.device).type != "cpu":
            raise ConfigError(f"Memory of {config.device} cannot be measured; set num_blocks or kv_memory_bytes.")
        step = _remembered_step_bytes(config, model, layout, forward, sampler, measurements)
        available = available_memory()
        budget = int(config.kv_memory_fraction * available) - step
        origin = (
            f"{config.kv_memory_fraction:.0%} of {available / GIB:.2f} GiB available less {step / GIB:.2f} GiB "
            "for the largest step"
        )
        remedy = (
            f"{available / GIB:.2f} GiB of memory are available, of which {config.kv_memory_fraction:.0%} may be used, and the "
            f"largest step takes {step / GIB:.2f} GiB; raise kv_memory_fraction, lower max_num_batched_tokens or free memory"
        )
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ConfigError(f"Not one KV block of {block_bytes} bytes fits: {remedy}.")
    return KVBudget(num_blocks, block_bytes, origin)


def _remembered_step_bytes(
    config: EngineConfig,
    model: LoadedModel,
    layout: KVLayout,
    forward: Forward,
    sampler: Sampler,
    measurements: Measurements | None,
) -> int:
    if measurements is None:
        return _largest_step_bytes(config, model, layout, forward, sampler)
    settings = asdict(config)
    for irrelevant in ("model", "model_name", "kv_memory_fraction", "graph_batch_sizes", "draft"):
        del settings[irrelevant]
    kernel = getattr(forward, "kernel", None)
    depends_on = {
        **settings,
        "fingerprint": model.fingerprint,
        "decoder_dtype": model.decoder.dtype,
        "forward": (type(forward).__qualname__, type(kernel).__qualname__),
        "torch_threads": torch.get_num_threads(),
    }
    known = measurements.get("largest-step", depends_on)
    if known is None:
        known = _largest_step_bytes(config, model, layout, forward, sampler)
        measurements.put("largest-step", depends_on, known)
    return known


def _largest_step_bytes(config: EngineConfig, model: LoadedModel, layout: KVLayout, forward: Forward, sampler: Sampler) -> int:
    """What a step of `max_num_batched_tokens` tokens at the end of a full context takes beside weights and KV.

    The context's earlier blocks are one block again and again: attention reads as much, and little KV memory is needed.
    """
    max_context = config.max_model_len or model.spec.max_position
    context = min(max_context, PROFILED_CONTEXT)
    tokens = min(config.max_num_batched_tokens, context)
    size = config.block_size
    own_blocks = -(-tokens // size) + 1
    runner = Runner(forward, layout.allocate(own_blocks + 1))
    first = (context - tokens) // size  # this block and those after it are the step's own
    table = [0] * first + list(range(1, -(-context // size) - first + 1))
    batch = single_batch(table, context - tokens, tokens, size)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    empty = batch.token_ids[:0].numpy().astype("uint32")
    rows = min(config.max_num_seqs, tokens)
    states = [SamplingState(params, empty, 0, 0, ()) for _ in range(rows)]

    @torch.inference_mode()
    def step() -> None:
        logits = runner.run(batch, range(rows))
        sampler.sample(logits.nan_to_num_(), states)  # the KV read was never written

    measured = peak_growth(step)
    # Attention gathers one layer's keys and values at a time, in the dtype of the layers or wider; beyond the measured context
    # it gathers more of them.
    gathered = model.spec.kv_bytes_per_token(model.decoder.dtype.itemsize) // len(model.spec.attention)
    return measured + (max_context - context) * gathered
