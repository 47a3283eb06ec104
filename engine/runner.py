"""Runs the decoder over a batch, with the KV memory it writes to. Knows tensors and blocks, not requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.interface import AttentionKernel, AttentionSpec, StepBatch
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


class _PagedAttention:
    """What the decoder's layers call during one step."""

    __slots__ = ("_batch", "_kernel", "_layers", "_specs")

    def __init__(
        self,
        kernel: AttentionKernel,
        layers: tuple[torch.Tensor, ...],
        specs: tuple[AttentionSpec, ...],
        batch: StepBatch,
    ) -> None:
        self._kernel = kernel
        self._layers = layers
        self._specs = specs
        self._batch = batch

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = self._layers[layer]
        self._kernel.write(kv, k, v, self._batch)
        return self._kernel.attend(q, kv, self._specs[layer], self._batch)


class Runner:
    """One model, one kernel, one KV memory."""

    def __init__(self, model: LoadedModel, kernel: AttentionKernel, num_blocks: int, block_size: int) -> None:
        """Raises ValueError as `allocate_kv`."""
        self.kernel = kernel
        self.block_size = block_size
        self.device: torch.device = model.decoder.device
        self._decoder = model.decoder
        self._specs = model.spec.attention
        self._kv = allocate_kv(model, num_blocks, block_size)
        self._layers = tuple(self._kv[:, layer] for layer in range(len(self._specs)))

    @torch.inference_mode()
    def run(self, batch: StepBatch, rows: Sequence[int], copies: Sequence[BlockCopy] = ()) -> torch.Tensor | None:
        """Computes a batch after making the copies. Returns the logits that follow the tokens in `rows` of the batch,
        float32 [len(rows), vocabulary], or None when there are none."""
        if copies:
            self._copy(copies)
        attention = _PagedAttention(self.kernel, self._layers, self._specs, batch)
        hidden = self._decoder.forward(batch.token_ids, batch.positions, attention)
        if not rows:
            return None
        if len(rows) != hidden.shape[0] or list(rows) != list(range(len(rows))):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=self.device)]
        return self._decoder.logits(hidden)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        # All sources are read before anything is written: a source freed in this step's plan may be a destination too.
        sources, destinations = zip(*copies, strict=True)
        read = self._kv[torch.tensor(sources, dtype=torch.int64, device=self.device)]
        self._kv[torch.tensor(destinations, dtype=torch.int64, device=self.device)] = read
