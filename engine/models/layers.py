"""The layers that the decoders share. Plain objects, not torch modules: one call less for every layer of every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.checkpoints.errors import CheckpointError
from engine.kernels.interface import LayerAttention
from engine.models.operations import Operations, RMSNorm
from engine.models.spec import ModelSpec
from engine.models.weights import Weights
from engine.quantization.matrix import QuantizedMatrix
from engine.quantization.scheme import Scheme


class Linear:
    """x [T, in] -> [T, out].

    On a CPU the weight is kept in oneDNN's blocked layout, which is worth it twice. In bfloat16 it is 1.3 to 1.8 times as fast
    as F.linear at every number of rows (measured on SmolLM2's shapes), which lays the weight out anew in every call. In
    float32 a row's result does not depend on the rows beside it: F.linear chooses its kernel, and with it the order of
    summation, by the number of rows, and the last bits of a token's logits would tell how its step was batched. The one
    exception is a single row of a wide input, for which oneDNN splits the sum; it is given a second row.
    """

    __slots__ = ("_plain", "_ready", "bias", "dtype", "out_features", "quantized")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self.bias = bias
        self.dtype = weight.dtype
        self.quantized: QuantizedMatrix | None = None
        self._plain: torch.Tensor | None = weight
        self._ready: _Ready | None = None

    @classmethod
    def of_quantized(cls, matrix: QuantizedMatrix, dtype: torch.dtype, bias: torch.Tensor | None = None) -> Linear:
        """A layer of a quantised matrix. Called, it computes in `dtype` with the dequantised weights, which it makes at the
        first call; a kernel that takes `quantized` itself never has them made."""
        layer = cls.__new__(cls)
        layer.out_features = matrix.shape[0]
        layer.bias = bias
        layer.dtype = dtype
        layer.quantized = matrix
        layer._plain = layer._ready = None
        return layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ready = self._ready or self._make_ready()
        if not ready.packed:
            return functional.linear(x, ready.weight, self.bias)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.out_features))
        if rows == 1 and ready.weight.dtype == torch.float32:
            return self._product(torch.cat((x, x)), ready.weight)[:1]
        return self._product(x, ready.weight)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "none", [], "")

    def plain_weight(self) -> torch.Tensor:
        """The weight row-major, [out, in], in this layer's dtype: as the checkpoint has it, or dequantised."""
        if self._plain is not None:
            return self._plain
        if self._ready is not None:
            return self._ready.weight.to_dense() if self._ready.packed else self._ready.weight
        if self.quantized is None:
            raise RuntimeError("the weights of this layer were given away")
        return self.quantized.dequantize(self.dtype)

    def give_away(self) -> None:
        """Lets go of the weights: who computes with them has a copy of its own."""
        self._plain = self._ready = self.quantized = None

    def _make_ready(self) -> _Ready:
        weight = self.plain_weight()
        packed = can_pack(weight)
        # Last of all: another thread that finds it there finds all of it.
        self._ready = ready = _Ready(
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS) if packed else weight, packed
        )
        self._plain = None
        return ready


class _Ready(NamedTuple):
    """A weight as it is multiplied: in oneDNN's layout where `packed`, else [out, in]."""

    weight: torch.Tensor
    packed: bool


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

    def __call__(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        return self.down(operations.gate(self.gate_up(x)))


class Attention:
    """Grouped-query self-attention around the attention kernel: q, k and v in one matrix product, rotation, output projection.

    `q_norm`, `k_norm`: RMS norms over each head (Qwen3).
    """

    __slots__ = ("index", "k_norm", "norms", "num_heads", "num_kv_heads", "out", "q_norm", "qkv")

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
        self.norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)

    def __call__(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: LayerAttention,
        operations: Operations,
    ) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, self.num_heads + 2 * self.num_kv_heads, -1)
        mixed = operations.attend(attention, self.index, qkv, self.num_heads, rotation, self.norms)
        return self.out(mixed.reshape(tokens, -1))


class DecoderLayer:
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: LayerAttention,
        operations: Operations,
    ) -> torch.Tensor:
        """x and delta: what the layer before left, not yet added up; they are, into x. Returns this layer's delta: so every
        addition stands before a norm, and both can be one operation."""
        mixed = self.attention(operations.add_norm(x, delta, self.attention_norm), rotation, attention, operations)
        return self.mlp(operations.add_norm(x, mixed, self.mlp_norm), operations)


def take_linear(
    weights: Weights, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False, scheme: Scheme | None = None
) -> Linear:
    """A linear layer of one or several of a checkpoint's: (name without `.weight`, rows) each. `scheme` None: as it is."""
    named = [(f"{name}.weight", rows) for name, rows in parts]
    fused_bias = weights.take_rows([(f"{name}.bias", rows) for name, rows in parts], None) if bias else None
    if scheme is not None:
        matrix = take_quantized(weights, named, columns, scheme)
        if matrix is not None:
            return Linear.of_quantized(matrix, weights.dtype, fused_bias)
    return Linear(weights.take_rows(named, columns), fused_bias)


def take_quantized(
    weights: Weights,
    parts: Sequence[tuple[str, int]],
    columns: int,
    scheme: Scheme,
    taken: torch.Tensor | None = None,
) -> QuantizedMatrix | None:
    """Several tensors of a checkpoint as one quantised matrix: (name, rows) each; None where `scheme` leaves them as they are.

    Only this one matrix stands beside its codes, in the precision of the checkpoint, and only for as long as this takes.
    taken: the weights, where they have been taken already. Raises CheckpointError.
    """
    names = [name for name, _ in parts]
    rows = sum(count for _, count in parts)
    stored = scheme.stored(names)
    if stored is not None:
        if tuple(stored.shape) != (rows, columns):
            raise CheckpointError(
                f"{weights.directory}: {', '.join(names)} have the shape {list(stored.shape)} in their quantised form, but "
                f"config.json implies {[rows, columns]}. Check that they belong together."
            )
        for name in names:
            weights.ignore(name)
        return stored.to(weights.device)
    if not scheme.quantizes(names):
        return None
    weight = weights.take_rows(parts, columns, dtype=weights.stored_dtype(names)) if taken is None else taken
    try:
        return scheme.quantize(names, weight)
    except ValueError as error:
        raise CheckpointError(f"{weights.directory}: {', '.join(names)}: {error}. Fetch the model again.") from error


def take_norm(weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(weights.take(f"{name}.weight", (size,)), eps)


def take_decoder_layer(weights: Weights, spec: ModelSpec, index: int, scheme: Scheme | None = None) -> DecoderLayer:
    """The layer that Llama, Mistral and Qwen share, with the biases and head norms that `spec` says. Hugging Face's names."""
    name = f"model.layers.{index}"
    hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.rms_norm_eps
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = [(f"{attn}.q_proj", q_rows), (f"{attn}.k_proj", kv_rows), (f"{attn}.v_proj", kv_rows)]
    linear = partial(take_linear, weights, scheme=scheme)
    return DecoderLayer(
        attention_norm=take_norm(weights, f"{name}.input_layernorm", hidden, eps),
        attention=Attention(
            spec,
            index,
            qkv=linear(qkv, hidden, bias=spec.attention_bias),
            out=linear([(f"{attn}.o_proj", hidden)], q_rows, bias=spec.output_bias),
            q_norm=take_norm(weights, f"{attn}.q_norm", spec.head_dim, eps) if spec.qk_norm else None,
            k_norm=take_norm(weights, f"{attn}.k_norm", spec.head_dim, eps) if spec.qk_norm else None,
        ),
        mlp_norm=take_norm(weights, f"{name}.post_attention_layernorm", hidden, eps),
        mlp=MLP(
            gate_up=linear([(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden, bias=spec.mlp_bias),
            down=linear([(f"{mlp}.down_proj", hidden)], inner, bias=spec.mlp_bias),
        ),
    )
