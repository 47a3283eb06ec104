"""From a decoder of torch layers to the native one, where model and machine allow it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels.cpu.decoder import DecoderTensors, LayerTensors, NativeDecoder, Weight, unfit
from engine.kernels.cpu.library import Library, Team
from engine.kernels.cpu.matrix import Format, quantized_format
from engine.kernels.cpu.methods import Choose, plain
from engine.models.decoder import Decoder
from engine.models.layers import DecoderLayer, Linear
from engine.models.rope import rope_table
from engine.quantization.matrix import QuantizedMatrix


def why_not_native(decoder: Decoder) -> str | None:
    """Why this decoder cannot run natively, as the end of a sentence, or None when it can."""
    spec = decoder.spec
    if decoder.device.type != "cpu":
        return f"it runs on {decoder.device.type}, not on a CPU"
    if spec.output_bias or spec.mlp_bias:
        return "it has biases outside of q, k and v"
    if spec.rope.dim != spec.head_dim:
        return "it rotates a part of each head only"
    return unfit(spec.attention, spec.hidden_size, spec.intermediate_size)


def native_decoder(
    decoder: Decoder,
    library: Library,
    team: Team,
    choose: Choose = plain,
    half: Format | None = None,
    *,
    give_away: bool = False,
) -> NativeDecoder:
    """Packs the weights of `decoder`. Raises ValueError where `why_not_native` names a reason.

    `choose`: what multiplies each format; `half`: how 16-bit weights are stored (default: as the checkpoint has them).
    `give_away`: the layers of `decoder` let go of their weights, and cannot compute any more.
    """
    reason = why_not_native(decoder)
    if reason is not None:
        raise ValueError(f"the model cannot run natively: {reason}")
    spec = decoder.spec
    half_dim = spec.head_dim // 2
    cos, signed_sin = rope_table(spec.rope, dtype=torch.float32, device=torch.device("cpu"))
    tensors = DecoderTensors(
        embedding=decoder.embedding,
        layers=_layers(decoder, give_away),
        intermediate_size=spec.intermediate_size,
        norm=decoder.norm.weight,
        head=_weight(decoder.head),
        cos=cos[:, :half_dim],
        sin=signed_sin[:, half_dim:],
        norm_epsilon=spec.rms_norm_eps,
    )

    def format_of(weight: Weight) -> Format:
        if isinstance(weight, QuantizedMatrix):
            return quantized_format(weight)
        if weight.dtype == torch.float32:
            return Format.FLOAT32
        return half or (Format.BFLOAT16 if weight.dtype == torch.bfloat16 else Format.FLOAT16)

    native = NativeDecoder(library, team, spec.attention, tensors, choose, format_of)
    if give_away:
        decoder.head.give_away()
    return native


def _layers(decoder: Decoder, give_away: bool) -> Iterator[LayerTensors]:
    """One layer's weights after the other; the one before may be let go of by then."""
    for layer in decoder.layers:
        yield _layer_tensors(layer)
        if give_away:
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
                linear.give_away()


def _layer_tensors(layer: DecoderLayer) -> LayerTensors:
    attention, mlp = layer.attention, layer.mlp
    return LayerTensors(
        qkv=_weight(attention.qkv),
        out=_weight(attention.out),
        gate_up=_weight(mlp.gate_up),
        down=_weight(mlp.down),
        input_norm=layer.attention_norm.weight,
        post_norm=layer.mlp_norm.weight,
        qkv_bias=attention.qkv.bias,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
    )


def _weight(linear: Linear) -> Weight:
    return linear.plain_weight() if linear.quantized is None else linear.quantized
