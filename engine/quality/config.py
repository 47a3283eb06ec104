"""What is measured, and what a format may cost before it is called not ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a format may be from its reference.

    perplexity_ratio: its perplexity over the reference's, at most. agreement: share of positions of the text at which both
    would choose the same token, at least. divergence: Kullback-Leibler divergence of its next-token distribution from the
    reference's, in nats, mean over positions, at most; it holds for positions computed in chunks as in a prefill, and for those
    computed one at a time as in a decode.
    """

    perplexity_ratio: float
    agreement: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Format:
    """`settings`: fields of EngineConfig that make it. `reference`: what it is measured against."""

    name: str
    settings: Mapping[str, Any]
    bounds: Bounds
    reference: str = "bf16"


REFERENCE = Format("float32", MappingProxyType({"dtype": "float32", "kernels": "reference"}), Bounds(1.0, 1.0, 0.0), "float32")
"""Plain torch, so that the kernels are measured as well as the rounding."""

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        made.name: made
        for made in (
            Format("bf16", MappingProxyType({"dtype": "bfloat16"}), Bounds(1.01, 0.97, 0.005), REFERENCE.name),
            Format("int8", MappingProxyType({"dtype": "bfloat16", "quantization": "int8"}), Bounds(1.02, 0.95, 0.01)),
            Format("int4", MappingProxyType({"dtype": "bfloat16", "quantization": "int4"}), Bounds(1.10, 0.85, 0.10)),
            Format("gguf", MappingProxyType({"dtype": "bfloat16", "quantization": "gguf"}), Bounds(1.02, 0.95, 0.01)),
            Format("kv-int8", MappingProxyType({"dtype": "bfloat16", "kv_dtype": "int8"}), Bounds(1.02, 0.95, 0.01)),
        )
    }
)
"""By name, in the order in which they are printed. A format is ready when it is within all of its bounds."""


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """window: tokens of context that a text is cut into. chunk: tokens computed at a time. max_tokens: of all texts together.

    sampled_rows: positions, evenly spread, whose whole logits are compared (the others count by their choice and by the
    probability of the token that follows). prompts, prompt_tokens, generated_tokens: of the parts of the texts whose ends are
    read one token at a time, as in a decode, and are generated freely instead.
    """

    window: int = 3072
    chunk: int = 256
    max_tokens: int = 16_384
    sampled_rows: int = 512
    prompts: int = 4
    prompt_tokens: int = 128
    generated_tokens: int = 48
    formats: Mapping[str, Format] = field(default_factory=lambda: FORMATS)
