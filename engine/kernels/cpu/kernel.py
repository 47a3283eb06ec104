"""The CPU attention kernel behind engine/kernels/interface.py."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from engine.kernels.cpu.library import AttentionArgs, Library, Team, WriteArgs, load_library
from engine.kernels.interface import AttentionSpec, StepBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuAttention:
    """Paged attention in C++: prefill over a cached prefix and decode in one call, parallel over sequences, heads and keys.

    Computes in float32 (bfloat16 products on AMX) whatever the KV dtype is.
    """

    name = "cpu"

    def __init__(self, library: Library, team: Team) -> None:
        self.library = library
        self.team = team

    @classmethod
    def build(cls, head_dim: int, threads: int, cache_dir: Path) -> CpuAttention:
        """Raises engine.kernels.cpu.library.KernelBuildError where it cannot be built."""
        library = load_library(head_dim, cache_dir)
        return cls(library, library.team(threads))

    @property
    def has_amx(self) -> bool:
        """Whether bfloat16 prefill runs on AMX tiles."""
        return self.library.has_amx

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Stores k and v, both [T, kv heads, dim], in the slots of `batch`. kv: [block, 2, kv head, token, dim]."""
        if k.stride(2) != 1:
            k = k.contiguous()
        if v.stride(2) != 1:
            v = v.contiguous()
        if not k.dtype == v.dtype == kv.dtype:
            raise ValueError(f"keys, values and KV memory must be of one dtype, not {k.dtype}, {v.dtype}, {kv.dtype}")
        kv_stride = kv.stride()
        self.library.write(
            WriteArgs(
                kv=kv.data_ptr(),
                k=k.data_ptr(),
                v=v.data_ptr(),
                slots=batch.slots.data_ptr(),
                kv_block=kv_stride[0],
                kv_side=kv_stride[1],
                kv_head=kv_stride[2],
                kv_token=kv_stride[3],
                k_token=k.stride(0),
                k_head=k.stride(1),
                v_token=v.stride(0),
                v_head=v.stride(1),
                tokens=k.shape[0],
                kv_heads=k.shape[1],
                dim=k.shape[2],
                block_size=kv.shape[3],
                size=kv.element_size(),
            )
        )

    def attend(self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim]. Raises ValueError for a dtype or layout the kernel does not take."""
        dtype = _DTYPES.get(q.dtype)
        if dtype is None or kv.dtype != q.dtype:
            raise ValueError(
                f"the CPU kernel takes float32, bfloat16 or float16 q and KV of one dtype, not {q.dtype}, {kv.dtype}"
            )
        if q.stride(2) != 1:
            q = q.contiguous()
        if kv.stride(4) != 1:
            raise ValueError("the dims of one token must be contiguous in KV memory")
        out = torch.empty(q.shape, dtype=q.dtype)
        kv_stride = kv.stride()
        args = AttentionArgs(
            q=q.data_ptr(),
            kv=kv.data_ptr(),
            out=out.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            q_token=q.stride(0),
            q_head=q.stride(1),
            kv_block=kv_stride[0],
            kv_side=kv_stride[1],
            kv_head=kv_stride[2],
            kv_token=kv_stride[3],
            out_token=out.stride(0),
            out_head=out.stride(1),
            table_stride=batch.block_tables.stride(0),
            team=self.team.handle,
            num_sequences=batch.num_sequences,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=kv.shape[3],
            window=spec.window or 0,
            dtype=dtype,
            scale=ctypes.c_float(spec.scale),
        )
        status = self.library.attention(args)
        if status != 0:
            raise ValueError(f"the CPU kernel was built for another head_dim than {spec.head_dim}")
        return out
