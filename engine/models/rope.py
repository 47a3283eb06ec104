"""Rotary position embedding: a table of cosines and sines, one row per position, and how they are applied.

Angles are computed in float32 and cast to the model's dtype once, like transformers does in every forward pass. A row depends
on nothing but its position, so keys of a prefix are the same whatever follows it; this is what lets KV be shared.

*linear*: positions divided by the factor (kaiokendev). *llama3*: long wavelengths divided, a ramp between (Llama 3.1).
*yarn*: NTK by parts with a temperature on q and k (Peng et al., arXiv 2309.00071).

*dynamic* (NTK, bloc97 and emozilla): the base grows with the sequence once it is longer than the context of training. Which
length a cached key was rotated for would then depend on how the sequence was cut into steps. Here the token at position p is
rotated for the length p + 1, always. That is what transformers does for a prompt within the original context and for every
token generated after it, beyond the context too, so tokens are equal there. For a prompt longer than the original context
transformers rotates all its tokens for the whole length, and those keys belong to that one prompt only.
"""

from __future__ import annotations

import math

import torch

from engine.models.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """(float32 [dim / 2], the factor on cosines and sines) for positions within the original context."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor, 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec.theta**exponents, spec), _yarn_attention_factor(spec)
    return plain, 1.0


def rope_table(spec: RopeSpec, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for every position below `spec.max_context`, each [position, dim] as `rotate` takes them."""
    frequencies, scale = inverse_frequencies(spec)
    positions = torch.arange(spec.max_context, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    if spec.kind == "dynamic" and spec.max_context > spec.max_position:
        angles[spec.max_position :] = _dynamic_angles(positions[spec.max_position :], spec)
    cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates every head of x, [T, heads, dim]. cos, sin: the table's rows at the T positions, [T, 1, dim].

    The table's sines carry the signs, so that the halves need only be swapped.
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos).addcmul_(torch.cat((second, first), dim=-1), sin)


def _dynamic_angles(positions: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    lengths = positions + 1
    growth = (spec.factor * lengths / spec.max_position) - (spec.factor - 1)
    bases = spec.theta * growth ** (spec.dim / (spec.dim - 2))
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    return positions[:, None] * (1.0 / bases[:, None] ** exponents)


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    context = spec.original_max_position
    wavelengths = 2 * math.pi / plain
    low, high = context / spec.low_freq_factor, context / spec.high_freq_factor
    scaled = torch.where(wavelengths > low, plain / spec.factor, plain)
    smooth = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (wavelengths >= high) & (wavelengths <= low)
    return torch.where(between, (1 - smooth) * plain / spec.factor + smooth * plain, scaled)


def _yarn(wide: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """`wide`: theta to the exponents. Fast dimensions keep their frequency, slow ones are divided, a ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return spec.dim * math.log(spec.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (spec.factor * wide) * ramp + 1.0 / wide * (1 - ramp)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return temperature(spec.mscale) / temperature(spec.mscale_all_dim)
    return temperature(1.0)
