"""The kernel interface: one ragged batch, one paged KV tensor, two operations.

KV memory is one tensor `[block][layer][k, v][kv head][token][dim]`, so that a block is one run of bytes over all layers.
A kernel takes the view of one layer, `[block, 2, kv head, token, dim]`, with its strides as they are.

int8 KV has the same shape but for its last dim, which is dim + 4: for each [block][layer][k, v][kv head] the last two dims are
a run of token * (dim + 4) bytes, first token * dim codes, then one float32 scale a token (engine/kernels/int8_kv.py). So the
size of a block, copies of blocks and whatever moves them need not know what the bytes mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's ragged batch: B sequences, T new tokens in all, laid one sequence after the other.

    Sequence b's new tokens are rows query_start[b]:query_start[b+1]; they are the last of its context_lens[b] tokens.
    Python lists stand beside the tensors because a CPU kernel loops over sequences, and reading a tensor element by element
    is slow. In a step that is captured as a graph (engine/decode_graphs.py) `context_lens_list` is only a bound.

    token_ids: int64 [T]; positions: int64 [T]; slots: int64 [T], where each new token's KV goes
    (block * block_size + offset); query_start: int32 [B + 1]; context_lens: int32 [B], tokens of KV after this step's write;
    block_tables: int32 [B, max blocks], padded with 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_list: tuple[int, ...]
    context_lens_list: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens_list)

    @property
    def num_tokens(self) -> int:
        return self.query_start_list[-1]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. `scale` multiplies q k^T. `window`: a token sees itself and the window - 1 tokens before it
    (None: everything before it)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class AttentionKernel(Protocol):
    """Causal attention over paged KV. Stateless between steps."""

    name: str

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Stores k and v, both [T, kv heads, dim] of a floating dtype, in the slots of `batch`. kv: one layer's view. int8 KV
        is quantised here; every kernel writes the same bits."""

    def attend(self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim], after `write` of the same batch. A sequence of one new token (decode) and
        one of many (prefill over a cached prefix) may stand in one batch."""


class LayerAttention(Protocol):
    """What a decoder layer calls: writes this step's k and v and attends over the whole context."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [T, heads, dim]; k, v: [T, kv heads, dim] -> [T, heads, dim]."""


class PagedLayerAttention(LayerAttention, Protocol):
    """A `LayerAttention` over paged KV whose two operations can be called apart."""

    batch: StepBatch

    def memory(self, layer: int) -> torch.Tensor:
        """The layer's view of the KV memory."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim], once the step's keys and values are in `memory`."""
