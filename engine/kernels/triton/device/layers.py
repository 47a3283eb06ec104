"""What stands between the products of a layer, each a single pass over memory. Results that torch would round are rounded.

To be compiled without fused multiply-adds, as kv_write.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.device.kv_write import codes_of, magnitude_bits, scale_of


@triton.jit
def add_norm(x, delta, weight, out, eps, row_stride, COLUMNS: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """A program for a row: x += delta where ADD, and out = weight * x / sqrt(mean(x^2) + eps). delta and out are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    here = columns < COLUMNS
    values = tl.load(x + row * row_stride + columns, mask=here, other=0.0)
    if ADD:
        added = tl.load(delta + row * COLUMNS + columns, mask=here, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row * row_stride + columns, values, mask=here)
    wide = values.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)).to(x.dtype.element_ty)
    scaled = normed.to(tl.float32) * tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + columns, scaled.to(out.dtype.element_ty), mask=here)


@triton.jit
def gate(gate_up, out, columns, BLOCK: tl.constexpr):
    """A program for (row, BLOCK columns): out = silu(gate) * up. Both tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    at = gate_up + row * 2 * columns + column
    opened = tl.load(at, mask=here, other=0.0).to(tl.float32)
    silu = (opened / (1.0 + tl.exp(-opened))).to(out.dtype.element_ty).to(tl.float32)
    up = tl.load(at + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (silu * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def normed_halves(first, second, weight, eps, dims, here, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Two halves of head rows, float32, after the norm over them where NORM. Values are those of `weight`'s dtype."""
    if NORM:
        kind = weight.dtype.element_ty
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        low = tl.load(weight + dims, mask=here, other=0.0).to(tl.float32)[None, :]
        high = tl.load(weight + HALF + dims, mask=here, other=0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(kind).to(tl.float32) * low).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * high).to(kind).to(tl.float32)
    return first, second


@triton.jit
def rotate_write(
    qkv,
    q_out,
    cos,
    sin,
    q_weight,
    k_weight,
    eps_q,
    eps_k,
    kv,
    scales,
    slots,
    kv_block,
    kv_side,
    kv_head,
    kv_token,
    scale_block,
    scale_side,
    scale_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    INT8: tl.constexpr,
):
    """A program for (token, KV head): the queries of its group, its key and its value, ROWS >= the group + 2 rows of `qkv`
    [T, heads + 2 kv heads, DIM]. Queries and key are normed where NORM and rotated; queries go to `q_out`, key and value to
    their slot of the KV memory. cos, sin: [T, DIM], the sines with their signs (engine.models.rope). All contiguous.
    """
    HALF: tl.constexpr = DIM // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kind = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    kv_index = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HALF_PADDED)
    is_query = rows < GROUP
    is_key = rows == GROUP
    is_value = rows == GROUP + 1
    head = tl.where(is_query, kv_index * GROUP + rows, HEADS + (rows - GROUP) * KV_HEADS + kv_index)
    here = dims < HALF
    used = (rows < GROUP + 2)[:, None] & here[None, :]
    at = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + dims[None, :]
    first = tl.load(at, mask=used, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=used, other=0.0).to(tl.float32)

    q_first, q_second = normed_halves(first, second, q_weight, eps_q, dims, here, DIM, HALF, NORM)
    k_first, k_second = normed_halves(first, second, k_weight, eps_k, dims, here, DIM, HALF, NORM)
    low = tl.where(is_key[:, None], k_first, q_first)
    high = tl.where(is_key[:, None], k_second, q_second)
    cos_low = tl.load(cos + token * DIM + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + token * DIM + HALF + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + token * DIM + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + token * DIM + HALF + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    turned_low = ((low * cos_low).to(kind).to(tl.float32) + high * sin_low).to(kind)
    turned_high = ((high * cos_high).to(kind).to(tl.float32) + low * sin_high).to(kind)

    q_at = q_out + (token * HEADS + head)[:, None] * DIM + dims[None, :]
    asked = is_query[:, None] & here[None, :]
    tl.store(q_at, turned_low, mask=asked)
    tl.store(q_at + HALF, turned_high, mask=asked)

    slot = tl.load(slots + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    side = tl.where(is_value, 1, 0).to(tl.int64)
    kept = (is_key | is_value)[:, None] & here[None, :]
    to = kv + block * kv_block + kv_index.to(tl.int64) * kv_head + offset * kv_token
    to = to + side[:, None] * kv_side + dims[None, :]
    low = tl.where(is_value[:, None], first, turned_low.to(tl.float32))
    high = tl.where(is_value[:, None], second, turned_high.to(tl.float32))
    if INT8:
        top = tl.maximum(tl.max(magnitude_bits(low), 1), tl.max(magnitude_bits(high), 1))
        stored, divisor = scale_of(top)
        tl.store(to, codes_of(low, divisor[:, None]), mask=kept)
        tl.store(to + HALF, codes_of(high, divisor[:, None]), mask=kept)
        scale_at = scales + block * scale_block + kv_index.to(tl.int64) * scale_head + offset + side * scale_side
        tl.store(scale_at, stored, mask=is_key | is_value)
    else:
        tl.store(to, low.to(kv.dtype.element_ty), mask=kept)
        tl.store(to + HALF, high.to(kv.dtype.element_ty), mask=kept)
