"""A first pass that nobody asked for, so that the first request does not pay for what happens once.

Pages of buffers are touched, libraries choose and generate code, caches of the allocator fill. Nothing that a request could
see is left: the KV goes into blocks that nobody holds and nothing knows, and no counter counts it.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import single_batch
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

PROMPT = 64
"""Tokens of the prompt that is computed, where the KV memory holds as many."""

_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, logprobs=5),
)


def warm_up(runner: Runner, sampler: Sampler, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Computes a prompt in blocks 0, 1, ..., which must be free, and one token after it, and samples in every way."""
    tokens = min(PROMPT, num_blocks * block_size, max_model_len - 1)
    blocks = range(-(-tokens // block_size))
    prompt = np.zeros(tokens, dtype=np.uint32)
    states = [SamplingState(params, prompt, 0, 0, ()) for params in _KINDS]
    steps = [(0, tokens), (tokens - 1, 1)]
    for start, count in steps:
        logits = runner.run(single_batch(blocks, start, count, block_size, runner.device), [count - 1])
        bitmask = torch.full((len(states), -(-logits.shape[1] // 32)), -1, dtype=torch.int32)
        rows = logits.expand(len(states), -1).contiguous()
        for some in (states, *([state] for state in states)):  # each kind alone is another path than all together
            sampler.sample(rows[: len(some)], some)
            sampler.sample(rows[: len(some)], some, bitmask[: len(some)])
