"""A decoder's operations between its products, fused for an NVIDIA GPU (engine/models/operations.py)."""

from __future__ import annotations

from typing import cast

import torch
import triton

from engine.kernels.interface import LayerAttention, PagedLayerAttention
from engine.kernels.triton.attention import memory_of
from engine.kernels.triton.device import layers
from engine.models.operations import RMSNorm

GATE_BLOCK = 1024


class TritonOperations:
    """One launch each: residual and norm; SiLU and product; the norms of heads, rotation and the write of KV."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
        rows, columns = x.shape
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        padded = triton.next_power_of_2(columns)
        if rows:
            layers.add_norm[(rows,)](
                x,
                x if delta is None else delta.contiguous(),
                norm.weight,
                out,
                norm.eps,
                x.stride(0),
                COLUMNS=columns,
                PADDED=padded,
                ADD=delta is not None,
                num_warps=min(16, max(1, padded // 512)),
                enable_fp_fusion=False,
            )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            grid = (rows, triton.cdiv(columns, GATE_BLOCK))
            layers.gate[grid](gate_up.contiguous(), out, columns, BLOCK=GATE_BLOCK, enable_fp_fusion=False)
        return out

    def attend(
        self,
        attention: LayerAttention,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> torch.Tensor:
        """`attention`: a `PagedLayerAttention`."""
        paged = cast(PagedLayerAttention, attention)
        tokens, rows, dim = qkv.shape
        kv_heads = (rows - num_heads) // 2
        q = torch.empty((tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
        kv = paged.memory(layer)
        codes, scales, _ = memory_of(kv)
        cos, sin = rotation
        if tokens:
            layers.rotate_write[(tokens, kv_heads)](
                qkv.contiguous(),
                q,
                cos,
                sin,
                qkv if norms is None else norms[0].weight,
                qkv if norms is None else norms[1].weight,
                0.0 if norms is None else norms[0].eps,
                0.0 if norms is None else norms[1].eps,
                codes,
                scales,
                paged.batch.slots,
                *codes.stride()[:4],
                *scales.stride()[:3],
                HEADS=num_heads,
                KV_HEADS=kv_heads,
                ROWS=triton.next_power_of_2(num_heads // kv_heads + 2),
                DIM=dim,
                HALF_PADDED=triton.next_power_of_2(dim // 2),
                BLOCK_SIZE=kv.shape[3],
                NORM=norms is not None,
                INT8=kv.dtype == torch.int8,
                enable_fp_fusion=False,
            )
        return paged.attend(layer, q)
