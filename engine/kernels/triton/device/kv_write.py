"""Stores keys and values in their slots, rounded to the memory's dtype or quantised (engine/kernels/int8_kv.py).

To be compiled without fused multiply-adds: the codes are the same bits on every kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_MAGNITUDE = tl.constexpr(1e-30)
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken off again, it rounds a small float32 to an integer, halves to even."""


@triton.jit
def magnitude_bits(wide):
    """Magnitudes of float32 as integers, in which NaN is larger than infinity and infinity than all else."""
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(top_bits):
    """The scale to be stored for rows whose largest `magnitude_bits` are these, and what to divide them by (0: all codes are
    0)."""
    finite = top_bits < 0x7F800000
    largest = top_bits.to(tl.float32, bitcast=True)
    plain = finite & (largest >= LEAST_MAGNITUDE)
    scale = tl.where(plain, tl.div_rn(tl.where(plain, largest, 0.0), 127.0), 0.0)
    return tl.where(finite, scale, float("nan")), scale


@triton.jit
def codes_of(wide, divisor):
    """int8 codes; `divisor` has the shape of `wide` or broadcasts to it."""
    plain = divisor > 0.0
    quotient = tl.div_rn(tl.where(plain, wide, 0.0), tl.where(plain, divisor, 1.0))
    return ((quotient + ROUNDING) - ROUNDING).to(tl.int8)


@triton.jit
def write_kv(
    kv,
    scales,
    k,
    v,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_block,
    kv_side,
    kv_head,
    kv_token,
    scale_block,
    scale_side,
    scale_head,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
):
    """A program for (token, side)."""
    token = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, KV_HEADS_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    here = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    if side == 0:
        rows = tl.load(k + token * k_token + heads[:, None] * k_head + dims[None, :], mask=here, other=0.0)
    else:
        rows = tl.load(v + token * v_token + heads[:, None] * v_head + dims[None, :], mask=here, other=0.0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    to = kv + block * kv_block + side * kv_side + heads.to(tl.int64)[:, None] * kv_head + offset * kv_token + dims[None, :]
    if INT8:
        wide = rows.to(tl.float32)
        stored, divisor = scale_of(tl.max(magnitude_bits(wide), 1))
        tl.store(to, codes_of(wide, divisor[:, None]), mask=here)
        scale_at = scales + block * scale_block + side * scale_side + heads.to(tl.int64) * scale_head + offset
        tl.store(scale_at, stored, mask=heads < KV_HEADS)
    else:
        tl.store(to, rows.to(kv.dtype.element_ty), mask=here)
