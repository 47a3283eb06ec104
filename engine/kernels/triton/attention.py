"""The Triton attention kernel behind engine/kernels/interface.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton

from engine.kernels import int8_kv
from engine.kernels.interface import AttentionSpec, StepBatch
from engine.kernels.triton.device.attention import attend, combine
from engine.kernels.triton.device.kv_write import write_kv

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

SPLIT_KEYS = 256
"""A context is split for decoding only beyond this many tokens: a split's partial result must be small beside its keys."""

MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """What of a launch is decided when it is compiled, beside the model's shape: rows of a tile (new tokens times the heads of
    a group), keys of a tile, warps, and how many tiles are loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


def few_tiling(group: int, dim: int, memory: torch.dtype) -> Tiling:
    """For decoding: a tile is as low as a matrix product may be. group: query heads that share a KV head; memory: KV's dtype.

    This and `many_tiling` give the largest tiles of those tried that compile for sm_80 and sm_90 without spilling registers and
    fit 99 KiB of shared memory. float32, for checks rather than speed, has no tensor cores and gets small ones.
    """
    rows = max(16, triton.next_power_of_2(group))
    if memory == torch.float32:
        return Tiling(rows, 16, 4, 2)
    return Tiling(rows, 32 if memory == torch.int8 and dim > 128 else 64, 4, 2)


def many_tiling(group: int, dim: int, memory: torch.dtype) -> Tiling:
    """For prefill."""
    if memory == torch.float32:
        tiling = (16, 16, 4) if dim > 128 else (32, 16, 4) if dim > 64 else (32, 32, 4)
    elif dim > 128:
        tiling = (64, 32, 8)
    else:
        tiling = (128, 32, 8) if memory == torch.int8 and dim > 64 else (128, 64, 8)
    rows, keys, warps = tiling
    return Tiling(max(rows, triton.next_power_of_2(group)), keys, warps, 2)


class TritonAttention:
    """Paged attention on an NVIDIA GPU: prefill over a cached prefix and decode in one call.

    A query is multiplied in the memory's dtype, with int8 memory in its own; sums and the softmax are float32. Nothing is read
    back from the device, and no launch depends on what lies in the batch's tensors: `query_start_list` and `context_lens_list`
    only bound the grids, so a captured call can be replayed with other positions, tables and (shorter) contexts.
    """

    name = "triton"

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Stores k and v, both [T, kv heads, dim], in the slots of `batch`. kv: see engine/kernels/interface.py.

        Raises ValueError for a dtype or layout the kernel does not take.
        """
        codes, scales, dim = memory_of(kv)
        tokens, kv_heads = k.shape[:2]
        if k.shape[2] != dim:
            raise ValueError(f"keys have {k.shape[2]} dims, but KV memory {dim}")
        k, v = _dims_together(k), _dims_together(v)
        if tokens == 0:
            return
        write_kv[(tokens, 2)](
            codes,
            scales,
            k,
            v,
            batch.slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *codes.stride()[:4],
            *scales.stride()[:3],
            KV_HEADS=kv_heads,
            KV_HEADS_PADDED=triton.next_power_of_2(kv_heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            BLOCK_SIZE=kv.shape[3],
            INT8=kv.dtype == torch.int8,
            enable_fp_fusion=False,
        )

    def attend(self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim]. Raises ValueError for a dtype or layout the kernel does not take."""
        *_, dim = memory_of(kv)
        if dim != spec.head_dim:
            raise ValueError(f"the heads have {spec.head_dim} dims, but KV memory {dim}")
        asked = q.dtype
        q = _dims_together(q if kv.dtype == torch.int8 else q.to(kv.dtype))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group = spec.num_heads // spec.num_kv_heads
        few = few_tiling(group, dim, kv.dtype)
        few_tokens = few.rows // triton.next_power_of_2(group)
        if batch.num_tokens == batch.num_sequences:
            longest_few = longest = 1
        else:
            lengths = [stop - start for start, stop in pairwise(batch.query_start_list)]
            longest_few = max((length for length in lengths if length <= few_tokens), default=0)
            longest = max(lengths, default=0)
        if longest_few:
            self._few(q, kv, out, spec, batch, few, few_tokens, longest_few)
        if longest > few_tokens:
            many = many_tiling(group, dim, kv.dtype)
            tiles = q.shape[0] // (many.rows // triton.next_power_of_2(group)) + batch.num_sequences
            _launch(q, kv, out, spec, batch, many, (tiles, spec.num_kv_heads, 1), few_tokens=few_tokens)
        return out.to(asked)

    def _few(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        spec: AttentionSpec,
        batch: StepBatch,
        tiling: Tiling,
        few_tokens: int,
        longest: int,
    ) -> None:
        """The sequences of at most `few_tokens` new tokens, the longest of which has `longest`."""
        context = max(batch.context_lens_list)
        if spec.window is not None:
            context = min(context, spec.window + few_tokens + tiling.keys)  # and the rest of the tile where it begins
        splits = min(MAX_SPLITS, -(-context // SPLIT_KEYS))
        grid = (batch.num_sequences, spec.num_kv_heads, splits)
        if splits == 1:
            _launch(q, kv, out, spec, batch, tiling, grid, few_tokens=few_tokens, few=True)
            return
        shape = (batch.num_sequences, longest, spec.num_heads, MAX_SPLITS)
        partial = torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=q.device)
        largest, weight = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
        _launch(q, kv, out, spec, batch, tiling, grid, few_tokens=few_tokens, few=True, partial=(partial, largest, weight))
        combine[(batch.num_sequences, longest, spec.num_heads)](
            partial,
            largest,
            weight,
            out,
            batch.query_start,
            batch.context_lens,
            spec.window or 0,
            longest,
            out.stride(0),
            out.stride(1),
            HEADS=spec.num_heads,
            DIM=spec.head_dim,
            DIM_PADDED=triton.next_power_of_2(spec.head_dim),
            TOKENS=tiling.rows // triton.next_power_of_2(spec.num_heads // spec.num_kv_heads),
            KEYS=tiling.keys,
            FEW_TOKENS=few_tokens,
            SPLIT_KEYS=SPLIT_KEYS,
            MAX_SPLITS=MAX_SPLITS,
            WINDOWED=spec.window is not None,
            enable_fp_fusion=True,
        )


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    batch: StepBatch,
    tiling: Tiling,
    grid: tuple[int, int, int],
    *,
    few_tokens: int,
    few: bool = False,
    partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    codes, scales, dim = memory_of(kv)
    group = spec.num_heads // spec.num_kv_heads
    parts = (out, out, out) if partial is None else partial
    attend[grid](
        q,
        codes,
        scales,
        out,
        *parts,
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        spec.scale,
        spec.window or 0,
        batch.num_sequences,
        parts[0].shape[1],
        q.stride(0),
        q.stride(1),
        *codes.stride()[:4],
        *scales.stride()[:3],
        out.stride(0),
        out.stride(1),
        batch.block_tables.stride(0),
        KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        DIM=dim,
        DIM_PADDED=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=kv.shape[3],
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        FEW=few,
        FEW_TOKENS=few_tokens,
        SPLIT_KEYS=SPLIT_KEYS,
        MAX_SPLITS=MAX_SPLITS,
        PARTIAL=partial is not None,
        WINDOWED=spec.window is not None,
        INT8=kv.dtype == torch.int8,
        PRECISION="ieee",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )


def _dims_together(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


def memory_of(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The values or codes, the scales (the values again where there are none), and the dims of a head. Raises ValueError for
    what the kernel does not take."""
    if kv.dtype not in KV_DTYPES:
        raise ValueError(f"the Triton kernel takes float32, bfloat16, float16 or int8 KV, not {kv.dtype}")
    if kv.stride(4) != 1:
        raise ValueError("the dims of one token must be contiguous in KV memory")
    if kv.dtype != torch.int8:
        return kv, kv, kv.shape[4]
    return int8_kv.codes(kv), int8_kv.scales(kv), kv.shape[4] - int8_kv.SCALE_BYTES
