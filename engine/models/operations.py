"""What stands between the matrix products of a decoder. `TorchOperations` computes it anywhere; others fuse it for one device.

Chosen once, with the forward pass (engine/forward_choice.py), and handed down through the layers of every step.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.kernels.interface import LayerAttention
from engine.models.rope import rotate


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467) over the last dimension.

    Computed in float32 and rounded to the input's dtype before the weight is applied: the order of transformers.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class Operations(Protocol):
    """Rows are new tokens, T of them, in the model's dtype. Every intermediate result that torch would round is rounded."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
        """Adds `delta`, where there is one, into x in place and returns the norm of the sum. All [T, hidden size]."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 inner], the gate's columns first -> silu(gate) * up, [T, inner]."""

    def attend(
        self,
        attention: LayerAttention,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> torch.Tensor:
        """qkv: [T, heads + 2 kv heads, dim] -> [T, heads, dim], after the `norms` over the heads of q and k, where there are
        any, and their rotation (the table's rows at the T positions, [T, 1, dim] each, as engine.models.rope.rotate takes
        them)."""


class TorchOperations:
    """Plain torch, on any device."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
        return norm(x if delta is None else x.add_(delta))

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def attend(
        self,
        attention: LayerAttention,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> torch.Tensor:
        kv_heads = (qkv.shape[1] - num_heads) // 2
        rotated = num_heads + kv_heads
        if norms is None:
            q, k = rotate(qkv[:, :rotated], *rotation).split((num_heads, kv_heads), dim=1)
        else:
            q = rotate(norms[0](qkv[:, :num_heads]), *rotation)
            k = rotate(norms[1](qkv[:, num_heads:rotated]), *rotation)
        return attention(layer, q, k, qkv[:, rotated:])
