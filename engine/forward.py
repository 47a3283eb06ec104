"""The forward pass over paged KV: what the runner calls once a step, and the one made of a decoder and an attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cancelling import Cancellation
from engine.kernels.interface import AttentionKernel, AttentionSpec, StepBatch
from engine.models.decoder import Decoder
from engine.models.operations import Operations


class Forward(Protocol):
    """A model that is ready to run. Others than `LayeredForward` may fuse whatever they like."""

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Computes a batch and writes its KV, [block][layer][k, v][kv head][token][dim]. Returns the logits that follow the
        tokens in `rows` of the batch, float32 [len(rows), vocabulary]. One that is a `CancellableForward` may raise
        ForwardCancelledError."""


class LayeredForward:
    """Layer by layer, with any attention kernel and any operations between the products (None: plain torch)."""

    def __init__(self, decoder: Decoder, kernel: AttentionKernel, operations: Operations | None = None) -> None:
        self.kernel = kernel
        self.operations = operations
        self._decoder = decoder
        self._specs = decoder.spec.attention
        self._flag: Cancellation | None = None

    def cancel_by(self, flag: Cancellation) -> None:
        """Looks at this flag between layers from now on."""
        self._flag = flag

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        attention = PagedAttention(self.kernel, kv, self._specs, batch, self._flag)
        hidden = self._decoder.forward(batch.token_ids, batch.positions, attention, self.operations)
        if len(rows) != hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return self._decoder.logits(hidden)


class PagedAttention:
    """What the decoder's layers call during one step. An operation that writes KV itself takes `memory` and `attend`."""

    __slots__ = ("_flag", "_kernel", "_kv", "_specs", "batch")

    def __init__(
        self,
        kernel: AttentionKernel,
        kv: torch.Tensor,
        specs: tuple[AttentionSpec, ...],
        batch: StepBatch,
        flag: Cancellation | None = None,
    ) -> None:
        self._kernel = kernel
        self._kv = kv
        self._specs = specs
        self._flag = flag
        self.batch = batch

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._kernel.write(self.memory(layer), k, v, self.batch)
        return self.attend(layer, q)

    def memory(self, layer: int) -> torch.Tensor:
        """The layer's view of the KV memory."""
        return self._kv[:, layer]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Over the whole context, once this step's keys and values are in `memory`. Raises ForwardCancelledError."""
        if self._flag is not None:
            self._flag.check()
        return self._kernel.attend(q, self.memory(layer), self._specs[layer], self.batch)
