"""The CPU attention kernel behind engine/kernels/interface.py."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from engine.kernels import int8_kv
from engine.kernels.cpu.library import AttentionArgs, Library, Team, WriteArgs, load_library
from engine.kernels.interface import AttentionSpec, StepBatch

KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}


class CpuAttention:
    """Paged attention in C++: prefill over a cached prefix and decode in one call, parallel over sequences, heads and keys.

    Computes in float32; prefill over other KV than float32 takes its products in bfloat16 on AMX, or in float16 where the
    processor has them, with an error below that of keeping KV in bfloat16. What the layers compute in another dtype is
    converted to the KV's, beside int8 KV to float32.
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
        """Stores k and v, both [T, kv heads, dim], in the slots of `batch`. kv: see engine/kernels/interface.py.

        Raises ValueError for a dtype or layout the kernel does not take.
        """
        dtype, dim = _kv_layout(kv)
        io = _io_dtype(kv)
        k, v = k.to(io), v.to(io)
        if k.shape[2] != dim:
            raise ValueError(f"keys have {k.shape[2]} dims, but KV memory {dim}")
        if k.stride(2) != 1:
            k = k.contiguous()
        if v.stride(2) != 1:
            v = v.contiguous()
        status = self.library.write(
            WriteArgs(
                kv=kv.data_ptr(),
                k=k.data_ptr(),
                v=v.data_ptr(),
                slots=batch.slots.data_ptr(),
                kv_block=kv.stride(0),
                kv_side=kv.stride(1),
                kv_head=kv.stride(2),
                kv_token=dim if kv.dtype == torch.int8 else kv.stride(3),
                k_token=k.stride(0),
                k_head=k.stride(1),
                v_token=v.stride(0),
                v_head=v.stride(1),
                tokens=k.shape[0],
                kv_heads=k.shape[1],
                dim=dim,
                block_size=kv.shape[3],
                size=k.element_size(),
                dtype=dtype,
            )
        )
        if status != 0:
            raise ValueError(f"the CPU kernel was built for another head_dim than {dim}")

    def attend(self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim]. Raises ValueError for a dtype or layout the kernel does not take."""
        dtype, dim = _kv_layout(kv)
        asked, q = q.dtype, q.to(_io_dtype(kv))
        if dim != spec.head_dim:
            raise ValueError(f"the heads have {spec.head_dim} dims, but KV memory {dim}")
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        args = AttentionArgs(
            q=q.data_ptr(),
            kv=kv.data_ptr(),
            out=out.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            q_token=q.stride(0),
            q_head=q.stride(1),
            kv_block=kv.stride(0),
            kv_side=kv.stride(1),
            kv_head=kv.stride(2),
            kv_token=dim if kv.dtype == torch.int8 else kv.stride(3),
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
        return out.to(asked)


def _io_dtype(kv: torch.Tensor) -> torch.dtype:
    return torch.float32 if kv.dtype == torch.int8 else kv.dtype


def _kv_layout(kv: torch.Tensor) -> tuple[int, int]:
    """The kernel's number for the dtype, and the dims of a head. Raises ValueError for what it does not take."""
    dtype = KV_DTYPES.get(kv.dtype)
    if dtype is None:
        raise ValueError(f"the CPU kernel takes float32, bfloat16, float16 or int8 KV, not {kv.dtype}")
    if kv.stride(4) != 1:
        raise ValueError("the dims of one token must be contiguous in KV memory")
    if kv.dtype != torch.int8:
        return dtype, kv.shape[4]
    int8_kv.scales(kv)  # raises where codes and scales are no run of bytes
    return dtype, kv.shape[4] - int8_kv.SCALE_BYTES
