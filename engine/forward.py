"""The forward pass over paged KV: what the runner calls once a step, and the one made of a decoder and an attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.kernels.interface import AttentionKernel, AttentionSpec, StepBatch
from engine.models.decoder import Decoder


class Forward(Protocol):
    """A model that is ready to run. Others than `LayeredForward` may fuse whatever they like."""

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Computes a batch and writes its KV, [block][layer][k, v][kv head][token][dim]. Returns the logits that follow the
        tokens in `rows` of the batch, float32 [len(rows), vocabulary]."""


class LayeredForward:
    """Layer by layer, with any attention kernel."""

    def __init__(self, decoder: Decoder, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self._decoder = decoder
        self._specs = decoder.spec.attention

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        attention = _PagedAttention(self.kernel, kv, self._specs, batch)
        hidden = self._decoder.forward(batch.token_ids, batch.positions, attention)
        if len(rows) != hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return self._decoder.logits(hidden)


class _PagedAttention:
    """What the decoder's layers call during one step."""

    __slots__ = ("_batch", "_kernel", "_kv", "_specs")

    def __init__(self, kernel: AttentionKernel, kv: torch.Tensor, specs: tuple[AttentionSpec, ...], batch: StepBatch) -> None:
        self._kernel = kernel
        self._kv = kv
        self._specs = specs
        self._batch = batch

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = self._kv[:, layer]
        self._kernel.write(kv, k, v, self._batch)
        return self._kernel.attend(q, kv, self._specs[layer], self._batch)
