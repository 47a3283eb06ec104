"""Attention over paged KV in plain torch: the oracle for every other kernel, and the fallback where none of them can run.

It gathers a sequence's blocks into one run of keys and values and leaves the rest to
`torch.nn.functional.scaled_dot_product_attention`, which never materialises the scores. Any device, any floating dtype; int8 KV
is widened as it is gathered.

How a step is cut into calls depends only on the batch and the window, not on the layer; so it is planned once a step and
remembered for the layers that follow (`_Plan`). That is the only state, and it is derived from the batch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels import int8_kv
from engine.kernels.interface import AttentionSpec, StepBatch

PADDED_DECODE_TOKENS = 384
"""Decoding sequences of up to this many tokens of context go through one padded call; longer ones, one by one. Below it the
fixed cost of a call is larger than that of attending over padding (measured for 4 and 16 sequences)."""

MASK_ELEMENTS = 1 << 22
"""Bound on the size of one mask: a longer prefill is cut into row tiles."""


@dataclass(frozen=True, slots=True)
class _Single:
    """New tokens of one sequence: rows [start, stop) of the batch attend over the tokens [low, high) of its context, which lie
    in `blocks` from the token `offset` on. `mask` [rows, high - low] is added to the scores; None: causal if several rows."""

    start: int
    stop: int
    blocks: torch.Tensor
    offset: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Padded:
    """One new token of each of several sequences, contexts padded to the longest. `rows` [B]: their rows of the batch;
    `blocks` [B * blocks a sequence]; `spans`: the tokens that count, in the padded run; `mask` [B, 1, 1, padded tokens]."""

    rows: torch.Tensor
    blocks: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    mask: torch.Tensor


class ReferenceAttention:
    """The plain torch implementation of `AttentionKernel`. Not thread-safe."""

    name = "reference"

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None
        self._plans: dict[int | None, tuple[tuple[_Single, ...], _Padded | None]] = {}

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Stores k and v, both [T, kv heads, dim], in the slots of `batch`. kv: see engine/kernels/interface.py."""
        self._begin(batch)
        if self._slots is None:
            block_size = kv.shape[3]
            self._slots = (batch.slots // block_size, batch.slots % block_size)
        rows = torch.stack((k, v), 1)
        if kv.dtype == torch.int8:
            codes, scales = int8_kv.quantize(rows)
            int8_kv.codes(kv).permute(0, 3, 1, 2, 4).index_put_(self._slots, codes)
            int8_kv.scales(kv).permute(0, 3, 1, 2).index_put_(self._slots, scales)
        else:
            kv.permute(0, 3, 1, 2, 4).index_put_(self._slots, rows.to(kv.dtype))

    def attend(self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
        """q: [T, heads, dim] -> [T, heads, dim], after `write` of the same batch."""
        self._begin(batch)
        plan = self._plans.get(spec.window)
        if plan is None:
            plan = self._plans[spec.window] = _plan(batch, spec.window, kv.shape[3], q.dtype)
        singles, padded = plan
        if padded is None and len(singles) == 1:
            return _attend_single(q, kv, spec, singles[0])
        out = torch.empty_like(q)
        for call in singles:
            out[call.start : call.stop] = _attend_single(q[call.start : call.stop], kv, spec, call)
        if padded is not None:
            out[padded.rows] = _attend_padded(q[padded.rows], kv, spec, padded)
        return out

    def _begin(self, batch: StepBatch) -> None:
        if self._batch is not batch:
            self._batch, self._slots, self._plans = batch, None, {}


def _gather(kv: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The keys and values of `blocks`, one after the other: [2, kv heads, blocks, tokens, dim], contiguous, in `dtype`."""
    gathered = kv.permute(1, 2, 0, 3, 4).index_select(2, blocks)
    return (int8_kv.dequantize(gathered) if kv.dtype == torch.int8 else gathered).to(dtype)


def _attend_single(q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, call: _Single) -> torch.Tensor:
    gathered = _gather(kv, call.blocks, q.dtype).flatten(2, 3)[:, :, call.offset : call.offset + call.length]
    k, v = gathered[0].unsqueeze(0), gathered[1].unsqueeze(0)
    rows = q.shape[0]
    if rows == 1 and call.mask is None:
        # One query: the heads that share a KV head become rows of one product, so that no key is read twice.
        grouped = q.view(1, spec.num_kv_heads, -1, spec.head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, scale=spec.scale)
        return out.reshape(1, spec.num_heads, spec.head_dim)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=call.mask,
        is_causal=call.mask is None,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _attend_padded(q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, call: _Padded) -> torch.Tensor:
    sequences = q.shape[0]
    gathered = _gather(kv, call.blocks, q.dtype).view(2, spec.num_kv_heads, sequences, -1, spec.head_dim)
    # A mask is not enough: what a reused block still holds may be NaN or infinite, and that times zero is NaN.
    for index, (low, high) in enumerate(call.spans):
        gathered[:, :, index, :low] = 0
        gathered[:, :, index, high:] = 0
    k, v = gathered[0].transpose(0, 1), gathered[1].transpose(0, 1)
    grouped = q.view(sequences, spec.num_kv_heads, -1, spec.head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=call.mask, scale=spec.scale)
    return out.reshape(sequences, spec.num_heads, spec.head_dim)


def _plan(
    batch: StepBatch, window: int | None, block_size: int, dtype: torch.dtype
) -> tuple[tuple[_Single, ...], _Padded | None]:
    singles: list[_Single] = []
    short: list[int] = []
    for index, context in enumerate(batch.context_lens_list):
        rows = batch.query_start_list[index + 1] - batch.query_start_list[index]
        visible = context if window is None else min(context, window)
        if rows == 1 and visible <= PADDED_DECODE_TOKENS:
            short.append(index)
        else:
            singles.extend(_tiles(batch, index, window, block_size, dtype))
    if len(short) == 1:
        singles.extend(_tiles(batch, short[0], window, block_size, dtype))
        short = []
    return tuple(singles), _padded(batch, short, window, block_size, dtype) if short else None


def _tiles(batch: StepBatch, index: int, window: int | None, block_size: int, dtype: torch.dtype) -> list[_Single]:
    """The calls for one sequence. Row r of its n new tokens sits at position context - n + r of its context."""
    start, stop = batch.query_start_list[index], batch.query_start_list[index + 1]
    context = batch.context_lens_list[index]
    first = context - (stop - start)
    if first == 0 and (window is None or context <= window):
        return [_single(batch, index, start, stop, 0, context, block_size, None)]
    calls = []
    rows_a_tile = max(1, MASK_ELEMENTS // context)
    if window is not None:
        rows_a_tile = min(rows_a_tile, max(window, 64))  # else a tile reads far more keys than any of its rows may see
    for tile in range(start, stop, rows_a_tile):
        tile_stop = min(tile + rows_a_tile, stop)
        low_position, high = first + tile - start, first + tile_stop - start
        low = 0 if window is None else max(0, low_position - window + 1)
        mask = None if tile_stop - tile == 1 else _mask(low_position, low, high, window, dtype, batch.slots.device)
        calls.append(_single(batch, index, tile, tile_stop, low, high, block_size, mask))
    return calls


def _single(
    batch: StepBatch, index: int, start: int, stop: int, low: int, high: int, block_size: int, mask: torch.Tensor | None
) -> _Single:
    first_block = low // block_size
    blocks = batch.block_tables[index, first_block : -(-high // block_size)]
    return _Single(start, stop, blocks, low - first_block * block_size, high - low, mask)


def _mask(first_row: int, low: int, high: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[high - first_row, high - low]: 0 where the row at position p may see the key at position j, -inf elsewhere."""
    rows = torch.arange(first_row, high, device=device).unsqueeze(1)
    keys = torch.arange(low, high, device=device).unsqueeze(0)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _padded(batch: StepBatch, sequences: list[int], window: int | None, block_size: int, dtype: torch.dtype) -> _Padded:
    device = batch.slots.device
    spans = []
    tables = []
    starts = []
    for index in sequences:
        context = batch.context_lens_list[index]
        low = 0 if window is None else max(0, context - window)
        first_block = low // block_size
        spans.append((low - first_block * block_size, context - first_block * block_size))
        tables.append(batch.block_tables[index, first_block : -(-context // block_size)])
        starts.append(batch.query_start_list[index])
    width = max(table.shape[0] for table in tables)
    # Padding repeats a sequence's own last block: no other sequence's memory is read.
    blocks = torch.cat([torch.cat((table, table[-1:].expand(width - table.shape[0]))) for table in tables])
    mask = torch.full((len(sequences), 1, 1, width * block_size), float("-inf"), dtype=dtype, device=device)
    for row, (low, high) in enumerate(spans):
        mask[row, ..., low:high] = 0
    return _Padded(torch.tensor(starts, dtype=torch.int64, device=device), blocks, tuple(spans), mask)
