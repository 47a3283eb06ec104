"""The layers that the decoders share. Plain objects, not torch modules: one call less for every layer of every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.kernels.interface import LayerAttention
from engine.models.rope import rotate
from engine.models.spec import ModelSpec
from engine.models.weights import Weights


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467) over the last dimension.

    Computed in float32 and rounded to the input's dtype before the weight is applied: the order of transformers.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class Linear:
    """x [T, in] -> [T, out].

    On a CPU the weight is kept in oneDNN's blocked layout, which is worth it twice. In bfloat16 it is 1.3 to 1.8 times as fast
    as F.linear at every number of rows (measured on SmolLM2's shapes), which lays the weight out anew in every call. In
    float32 a row's result does not depend on the rows beside it: F.linear chooses its kernel, and with it the order of
    summation, by the number of rows, and the last bits of a token's logits would tell how its step was batched. The one
    exception is a single row of a wide input, for which oneDNN splits the sum; it is given a second row.
    """

    __slots__ = ("_pad", "bias", "out_features", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self.bias = bias
        self.packed = can_pack(weight)
        self._pad = self.packed and weight.dtype == torch.float32
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.out_features))
        if rows == 1 and self._pad:
            return self._product(torch.cat((x, x)))[:1]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def plain_weight(self) -> torch.Tensor:
        """The weight as the checkpoint has it, [out, in], row-major."""
        return self.weight.to_dense() if self.packed else self.weight


# Only a hint: the layout that oneDNN chooses serves other numbers of rows as well.
_PACKED_ROWS = 16


def can_pack(weight: torch.Tensor) -> bool:
    """True where `Linear` keeps this weight packed: on a CPU, and for bfloat16 on one that multiplies it natively."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class MLP:
    """The gated MLP with SiLU: down(silu(gate(x)) * up(x)); gate and up are one matrix product."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate).mul_(up))


class Attention:
    """Grouped-query self-attention around the attention kernel: q, k and v in one matrix product, rotation, output projection.

    `q_norm`, `k_norm`: RMS norms over each head (Qwen3).
    """

    __slots__ = ("index", "k_norm", "num_heads", "num_kv_heads", "out", "q_norm", "qkv")

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        qkv: Linear,
        out: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.index = index
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        tokens, heads = x.shape[0], self.num_heads
        rotated = heads + self.num_kv_heads
        qkv = self.qkv(x).view(tokens, rotated + self.num_kv_heads, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q = rotate(self.q_norm(qkv[:, :heads]), cos, sin)
            k = rotate(self.k_norm(qkv[:, heads:rotated]), cos, sin)
        else:
            q, k = rotate(qkv[:, :rotated], cos, sin).split((heads, self.num_kv_heads), dim=1)
        mixed = attention(self.index, q, k, qkv[:, rotated:])
        return self.out(mixed.reshape(tokens, -1))


class DecoderLayer:
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x)). Adds into x."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        x.add_(self.attention(self.attention_norm(x), cos, sin, attention))
        return x.add_(self.mlp(self.mlp_norm(x)))


def take_linear(weights: Weights, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Linear:
    """A linear layer of one or several of a checkpoint's: (name without `.weight`, rows) each."""
    fused = weights.take_rows([(f"{name}.weight", rows) for name, rows in parts], columns)
    fused_bias = weights.take_rows([(f"{name}.bias", rows) for name, rows in parts], None) if bias else None
    return Linear(fused, fused_bias)


def take_norm(weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(weights.take(f"{name}.weight", (size,)), eps)


def take_decoder_layer(weights: Weights, spec: ModelSpec, index: int) -> DecoderLayer:
    """The layer that Llama, Mistral and Qwen share, with the biases and head norms that `spec` says. Hugging Face's names."""
    name = f"model.layers.{index}"
    hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.rms_norm_eps
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = [(f"{attn}.q_proj", q_rows), (f"{attn}.k_proj", kv_rows), (f"{attn}.v_proj", kv_rows)]
    return DecoderLayer(
        attention_norm=take_norm(weights, f"{name}.input_layernorm", hidden, eps),
        attention=Attention(
            spec,
            index,
            qkv=take_linear(weights, qkv, hidden, bias=spec.attention_bias),
            out=take_linear(weights, [(f"{attn}.o_proj", hidden)], q_rows, bias=spec.output_bias),
            q_norm=take_norm(weights, f"{attn}.q_norm", spec.head_dim, eps) if spec.qk_norm else None,
            k_norm=take_norm(weights, f"{attn}.k_norm", spec.head_dim, eps) if spec.qk_norm else None,
        ),
        mlp_norm=take_norm(weights, f"{name}.post_attention_layernorm", hidden, eps),
        mlp=MLP(
            gate_up=take_linear(weights, [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden, bias=spec.mlp_bias),
            down=take_linear(weights, [(f"{mlp}.down_proj", hidden)], inner, bias=spec.mlp_bias),
        ),
    )
