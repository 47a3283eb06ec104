"""The KV memory, and the forward pass over it. Knows tensors and blocks, not requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.forward import Forward
from engine.kernels.interface import StepBatch
from engine.kv_cache import BlockCopy
from engine.models.registry import LoadedModel


def allocate_kv(model: LoadedModel, num_blocks: int, block_size: int) -> torch.Tensor:
    """KV memory of a model: [block][layer][k, v][kv head][token][dim]. Not initialised: the operating system commits its
    pages as they are first written, and no kernel reads what was not written.

    Raises ValueError for a model whose layers differ in their KV heads: one block could not hold them all.
    """
    shapes = {(spec.num_kv_heads, spec.head_dim) for spec in model.spec.attention}
    if len(shapes) != 1:
        raise ValueError(f"The layers of this model have KV of {len(shapes)} shapes; only models with one shape can be served.")
    ((kv_heads, dim),) = shapes
    shape = (num_blocks, len(model.spec.attention), 2, kv_heads, block_size, dim)
    return torch.empty(shape, dtype=model.decoder.dtype, device=model.decoder.device)


class Runner:
    """One model and its KV memory."""

    def __init__(self, forward: Forward, kv: torch.Tensor) -> None:
        """kv: as `allocate_kv` makes it."""
        self._forward = forward
        self._kv = kv
        self.forward_seconds = 0.0
        """Time spent in the forward pass so far."""

    @property
    def device(self) -> torch.device:
        """Where batches are expected."""
        return self._kv.device

    @torch.inference_mode()
    def run(self, batch: StepBatch, rows: Sequence[int], copies: Sequence[BlockCopy] = ()) -> torch.Tensor:
        """Computes a batch after making the copies. Returns the logits that follow the tokens in `rows` of the batch,
        float32 [len(rows), vocabulary]."""
        if copies:
            self._copy(copies)
        began = time.perf_counter()
        logits = self._forward.run(batch, self._kv, rows)
        self.forward_seconds += time.perf_counter() - began
        return logits

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        # All sources are read before anything is written: a source freed in this step's plan may be a destination too.
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._kv.device)
        self._kv[pairs[:, 1]] = self._kv[pairs[:, 0]]
