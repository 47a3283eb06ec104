"""Four bits a weight in groups along the inputs, each group with a scale and a minimum."""

from __future__ import annotations

import torch

from engine.quantization.matrix import QuantizedMatrix, check_finite

GROUP = 32
_LARGEST = 15
_LEVELS = (14.2, 15.2, 16.4)
"""Steps that a candidate lays over the range of its group. Above 15 it clips both ends, below 15 it leaves room there.
More of them gain less than a hundredth of the error (measured on normal and heavy-tailed weights)."""

_CHUNK = 1 << 18  # weights at a time: with what stands beside them they stay in a core's cache
_TINY = 1e-30


def quantize_int4(weight: torch.Tensor, group: int = GROUP) -> QuantizedMatrix:
    """weight [n, k] -> codes 0..15 with a scale and a minimum for each `group` inputs, of least squared error among candidates.

    A candidate lays an even grid over the group's range; the scale and minimum that fit its codes best follow in closed form
    (least squares), as in llama.cpp's k-quants. A group whose weights are such a grid already comes back as it was. The
    squared error of a group is never above that of an even grid from its smallest to its largest weight. Raises ValueError
    when `group` does not divide k, and for infinities and NaNs.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"a group of {group} does not divide {columns} inputs")
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((rows, columns // group), dtype=torch.float32, device=weight.device)
    minimum = torch.empty_like(scale)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        # [group, groups]: sums over a group then run along whole vectors.
        wide = weight[start : start + step].float().view(-1, group).t().contiguous()
        own_codes, own_scale, own_minimum = _quantize_groups(wide)
        codes[start : start + step] = own_codes.t().reshape(-1, columns)
        scale[start : start + step] = own_scale.view(-1, columns // group)
        minimum[start : start + step] = own_minimum.view(-1, columns // group)
    check_finite(scale)
    check_finite(minimum)
    return QuantizedMatrix(codes, scale, minimum, bits=4, group=group)


def _quantize_groups(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [group, groups] -> (codes float32 [group, groups], scale [groups], minimum [groups])."""
    low, high = wide.aminmax(dim=0)
    span = high - low
    flat = span < _TINY
    mean = wide.mean(0)
    # Around the mean, so that small differences of large weights are not lost.
    centred = wide - mean
    middle = (low + high).mul_(0.5).sub_(mean)
    inverse = torch.where(flat, 0.0, 1.0 / span)
    best_gain = torch.full_like(span, -1.0)
    best_slope, best_offset = torch.zeros_like(span), torch.zeros_like(span)
    for levels in _LEVELS:
        slope = inverse * levels
        offset = middle * -slope + _LARGEST / 2
        gain, fitted, shift = _fit(centred, _encode(centred, slope, offset))
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_slope = torch.where(better, fitted, best_slope)
        best_offset = torch.where(better, shift, best_offset)
    codes = _encode(centred, best_slope.reciprocal().nan_to_num_(0.0, 0.0, 0.0), -best_offset / best_slope.clamp_min(_TINY))
    _, scale, shift = _fit(centred, codes)
    minimum = shift + mean
    # The plain grid over the whole range: the bound of the error, and exact where the weights lie on it.
    plain_scale = span / _LARGEST
    plain_slope = torch.where(flat, 0.0, 1.0 / plain_scale)
    plain = _encode(centred, plain_slope, (mean - low) * plain_slope)
    keep = _squared_error(wide, plain, plain_scale, low) <= _squared_error(wide, codes, scale, minimum)
    codes = torch.where(keep, plain, codes)
    scale = torch.where(flat, 0.0, torch.where(keep, plain_scale, scale))
    return codes, scale, torch.where(keep | flat, low, minimum)


def _encode(centred: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(offset, centred, slope).round_().clamp_(0, _LARGEST)


def _fit(centred: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least squares line through (code, centred weight) of each group: the squares it explains, slope, intercept."""
    size = codes.shape[0]
    mean = codes.sum(0).div_(size)
    spread = (codes * codes).sum(0).sub_(mean * mean * size)
    together = (codes * centred).sum(0)  # the weights' own mean is 0
    slope = torch.where(spread > 0, together / spread, 0.0)
    return slope * together, slope, -slope * mean


def _squared_error(wide: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return (codes * scale).add_(minimum).sub_(wide).square_().sum(0)
