"""What a model is: its sizes, its attention per layer and its rotary embedding. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.interface import AttentionSpec

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and how it is stretched over longer contexts. engine.models.rope has
    the formulas. `dim`: rotated dimensions of a head. `original_max_position`: the context of pre-training.
    `attention_factor` None: as the kind prescribes.
    """

    kind: RopeKind
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def max_context(self) -> int:
        """Positions that the embedding can be asked for: the configured context, or what the stretching reaches if more."""
        if self.kind in ("linear", "dynamic"):
            return max(self.max_position, int(self.max_position * self.factor))
        if self.kind == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model with grouped-query attention. `attention` has one entry per layer.

    `max_position` is the context the configuration states; `rope.max_context` is as far as one may go beyond it.
    `attention_bias`, `output_bias`, `mlp_bias`: whether q, k, v, the output projection and the MLP have biases.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention: tuple[AttentionSpec, ...]
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def max_context(self) -> int:
        return self.rope.max_context

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize
