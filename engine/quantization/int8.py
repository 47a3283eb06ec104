"""Eight bits a weight, symmetrical: what per-channel weight-only quantisation commonly is."""

from __future__ import annotations

import torch

from engine.quantization.matrix import QuantizedMatrix, check_finite

_ZERO = 128  # the code of 0
_LARGEST = 127
_CHUNK = 1 << 18  # weights at a time: with what stands beside them they stay in a core's cache
_TINY = torch.finfo(torch.float32).tiny


def quantize_int8(weight: torch.Tensor, group: int | None = None) -> QuantizedMatrix:
    """weight [n, k] -> codes = round(w / scale) + 128, minimum = -128 * scale, scale = largest magnitude / 127 of the group.

    group: None is one for each row (per output channel), else it divides k (ValueError). Codes lie in 1..255, so that those
    less 128 fit a signed byte. No weight is off by more than half of its scale. Raises ValueError for infinities and NaNs.
    """
    rows, columns = weight.shape
    group = columns if group is None else group
    if columns % group:
        raise ValueError(f"a group of {group} does not divide {columns} inputs")
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((rows, columns // group), dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        wide = weight[start : start + step].float().view(-1, columns // group, group)
        own = wide.abs().amax(-1).div_(_LARGEST)
        own[own < _TINY] = 0.0
        divisor = torch.where(own > 0, own, 1.0).unsqueeze(-1)
        signed = (wide / divisor).round_().clamp_(-_LARGEST, _LARGEST)
        scale[start : start + step] = own
        codes[start : start + step] = signed.add_(_ZERO).to(torch.uint8).view(-1, columns)
    check_finite(scale)
    return QuantizedMatrix(codes, scale, scale * -_ZERO, bits=8, group=group)
