"""Attention over paged KV: an online softmax over tiles of keys (FlashAttention, Dao et al., arXiv 2205.14135), for few new
tokens with the keys split over programs and a second kernel that combines them (Flash-Decoding, Dao et al., 2023).

The query heads that share a KV head are rows of one product, so a key is read once for all of them: row r of a tile is token
r // GROUP_PADDED and head r % GROUP_PADDED of the group. Block offsets are int64: KV memory has more than 2^31 elements.
How a context is split depends on that context alone, never on the batch, so a row's result does not change with its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tiles_a_split(tiles, KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How many tiles of keys one split takes: at least SPLIT_KEYS keys, and so many that MAX_SPLITS do."""
    return tl.maximum(SPLIT_KEYS // KEYS, tl.cdiv(tiles, MAX_SPLITS))


@triton.jit
def key_span(context, new, first, tokens, window, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """The keys [low, high) that the new tokens [first, first + tokens) of a sequence may see, the multiple of KEYS at which
    their tiles begin, and the number of those tiles."""
    high = context - new + tl.minimum(first + tokens, new)
    low = tl.maximum(context - new + first - window + 1, 0) if WINDOWED else 0
    begin = low // KEYS * KEYS
    return low, high, begin, tl.cdiv(high - begin, KEYS)


# What differs from step to step must not have a kernel of its own for every kind of number.
@triton.jit(do_not_specialize=["num_sequences", "few_tokens", "table_stride"])
def attend(
    q,
    kv,
    scales,
    out,
    partial,
    partial_max,
    partial_sum,
    query_start,
    context_lens,
    block_tables,
    scale,
    window,
    num_sequences,
    few_tokens,
    q_token,
    q_head,
    kv_block,
    kv_side,
    kv_head,
    kv_token,
    scale_block,
    scale_side,
    scale_head,
    out_token,
    out_head,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FEW: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FEW: a program for (sequence, KV head, split), for sequences of at most FEW_TOKENS new tokens. Otherwise one for (tile of
    new tokens, KV head), for the other sequences. PARTIAL: the result goes to `partial`, not normalised, [sequence, few_tokens,
    heads, MAX_SPLITS, DIM], with the largest score (times log2 e) and the sum of the weights beside it.
    """
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    tile = tl.program_id(0)
    kv_index = tl.program_id(1)
    split = tl.program_id(2)

    if FEW:
        sequence = tile
        first = 0
    else:
        # Sequence s owns the tiles from query_start[s] // TOKENS + s on: never fewer than it needs.
        sequence = 0
        beyond = num_sequences
        while sequence + 1 < beyond:
            middle = (sequence + beyond) // 2
            owns = tl.load(query_start + middle) // TOKENS + middle <= tile
            sequence = tl.where(owns, middle, sequence)
            beyond = tl.where(owns, beyond, middle)
        first = (tile - tl.load(query_start + sequence) // TOKENS - sequence) * TOKENS
    start = tl.load(query_start + sequence)
    new = tl.load(query_start + sequence + 1) - start
    if FEW:
        if new > FEW_TOKENS:
            return
    else:
        if (new <= FEW_TOKENS) | (first >= new):
            return
    context = tl.load(context_lens + sequence)
    low, high, begin, tiles = key_span(context, new, first, TOKENS, window, KEYS, WINDOWED)
    first_tile = 0
    last_tile = tiles
    if FEW:
        size = tiles_a_split(tiles, KEYS, SPLIT_KEYS, MAX_SPLITS)
        first_tile = split * size
        last_tile = tl.minimum(first_tile + size, tiles)
        if first_tile >= last_tile:
            return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    token = first + rows // GROUP_PADDED
    member = rows % GROUP_PADDED
    head = kv_index * GROUP + member
    asked = (token < new) & (member < GROUP)
    position = context - new + token
    q_at = q + (start + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    queries = tl.load(q_at, mask=asked[:, None] & (dims < DIM)[None, :], other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    head_base = kv + kv_index.to(tl.int64) * kv_head
    for index in range(first_tile, last_tile):
        key = begin + index * KEYS + tl.arange(0, KEYS)
        held = (key >= low) & (key < high)
        block = tl.load(table + key // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        offset = block * kv_block + (key % BLOCK_SIZE) * kv_token
        there = held[:, None] & (dims < DIM)[None, :]
        key_at = head_base + offset[:, None] + dims[None, :]
        keys = tl.load(key_at, mask=there, other=0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scale_at = scales + block * scale_block + kv_index * scale_head + key % BLOCK_SIZE
        if INT8:
            scores *= tl.load(scale_at, mask=held, other=0.0)[None, :]
        visible = held[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            visible &= key[None, :] > position[:, None] - window
        scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        weight = weight * shrink + tl.sum(weights, 1)
        largest = now
        values = tl.load(key_at + kv_side, mask=there, other=0)
        if INT8:  # a weight times a scale would leave the range of float16
            values = values.to(tl.float32) * tl.load(scale_at + scale_side, mask=held, other=0.0)[:, None]
        mixed = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), mixed * shrink[:, None], input_precision=PRECISION)

    stored = asked[:, None] & (dims < DIM)[None, :]
    if PARTIAL:
        row = ((sequence.to(tl.int64) * few_tokens + token) * (KV_HEADS * GROUP) + head) * MAX_SPLITS + split
        tl.store(partial + row[:, None] * DIM + dims[None, :], mixed, mask=stored)
        tl.store(partial_max + row, largest, mask=asked)
        tl.store(partial_sum + row, weight, mask=asked)
    else:
        out_at = out + (start + token).to(tl.int64)[:, None] * out_token + head[:, None] * out_head + dims[None, :]
        answer = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(out_at, answer.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["few_tokens"])
def combine(
    partial,
    partial_max,
    partial_sum,
    out,
    query_start,
    context_lens,
    window,
    few_tokens,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """A program for (sequence, new token, head): the splits of `attend` become one row of `out`."""
    sequence = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    start = tl.load(query_start + sequence)
    new = tl.load(query_start + sequence + 1) - start
    if (new > FEW_TOKENS) | (token >= new):
        return
    context = tl.load(context_lens + sequence)
    _low, _high, _begin, tiles = key_span(context, new, 0, TOKENS, window, KEYS, WINDOWED)
    count = tl.cdiv(tiles, tiles_a_split(tiles, KEYS, SPLIT_KEYS, MAX_SPLITS))
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIM_PADDED)
    row = ((sequence.to(tl.int64) * few_tokens + token) * HEADS + head) * MAX_SPLITS + splits
    used = splits < count
    largest = tl.load(partial_max + row, mask=used, other=float("-inf"))
    highest = tl.max(largest, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2(largest - base)
    weight = tl.sum(share * tl.load(partial_sum + row, mask=used, other=0.0), 0)
    parts = tl.load(partial + row[:, None] * DIM + dims[None, :], mask=used[:, None] & (dims < DIM)[None, :], other=0.0)
    answer = tl.sum(parts * share[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    out_at = out + (start + token).to(tl.int64) * out_token + head * out_head + dims
    tl.store(out_at, answer.to(out.dtype.element_ty), mask=dims < DIM)
