"""int8 KV memory: how a vector is quantised and where its parts lie.

Symmetrical, one scale for each key and each value of each KV head: scale = max |x| / 127, code = round(x / scale). For each
block, layer, side and KV head the memory holds block_size * dim codes and behind them block_size float32 scales, so that a
block stays one run of bytes. As a tensor of int8 its last two dims are [block_size, dim + 4]; they say how many bytes there
are, not where a token lies: use `codes` and `scales`.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LEAST_MAGNITUDE = 1e-30
"""A vector that is smaller throughout is stored as zero: its scale would lose bits."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., dim] floating -> int8 codes [..., dim] and float32 scales [...].

    A vector that holds NaN or infinity gets the scale NaN: it is poison as a whole, and no other vector is. The bits are those
    of quantize_row in kv_rows.h.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    scale = torch.where(largest < LEAST_MAGNITUDE, 0.0, largest / 127.0)
    plain = finite & (scale > 0)
    codes = torch.where(plain.unsqueeze(-1), x, 0.0) / torch.where(plain, scale, 1.0).unsqueeze(-1)
    return codes.round().to(torch.int8), torch.where(finite, scale, torch.nan)


def codes(kv: torch.Tensor) -> torch.Tensor:
    """kv: int8 [..., block_size, dim + 4] -> the codes, [..., block_size, dim], in place."""
    dim = kv.shape[-1] - SCALE_BYTES
    return kv.as_strided((*kv.shape[:-1], dim), (*kv.stride()[:-2], dim, 1))


def scales(kv: torch.Tensor) -> torch.Tensor:
    """kv: int8 [..., block_size, dim + 4] -> the scales, float32 [..., block_size], in place.

    Raises ValueError where the last two dims are no run of bytes, or other strides are no multiple of 4.
    """
    block_size, width = kv.shape[-2:]
    if kv.stride()[-2:] != (width, 1):
        raise ValueError("the tokens of one KV head must be contiguous in int8 KV memory")
    flat = kv.as_strided((*kv.shape[:-2], block_size * width), (*kv.stride()[:-2], 1))
    return flat[..., block_size * (width - SCALE_BYTES) :].view(torch.float32)


def dequantize(kv: torch.Tensor) -> torch.Tensor:
    """kv: int8 [..., block_size, dim + 4] -> float32 [..., block_size, dim]."""
    return codes(kv).float() * scales(kv).unsqueeze(-1)
