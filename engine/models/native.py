"""From a decoder of torch layers to the native one, where model and machine allow it."""

from __future__ import annotations

import torch

from engine.kernels.cpu.decoder import DecoderTensors, LayerTensors, NativeDecoder, unfit
from engine.kernels.cpu.library import Library, Team
from engine.models.decoder import Decoder
from engine.models.layers import DecoderLayer
from engine.models.rope import rope_table


def why_not_native(decoder: Decoder, library: Library) -> str | None:
    """Why this decoder cannot run natively, as the end of a sentence, or None when it can."""
    spec = decoder.spec
    if decoder.device.type != "cpu" or decoder.dtype != torch.bfloat16:
        return f"it runs in {str(decoder.dtype).removeprefix('torch.')} on {decoder.device.type}, not in bfloat16 on a CPU"
    if not library.has_amx:
        return "this processor has no AMX tiles for bfloat16"
    if spec.output_bias or spec.mlp_bias:
        return "it has biases outside of q, k and v"
    if spec.rope.dim != spec.head_dim:
        return "it rotates a part of each head only"
    return unfit(spec.attention, spec.hidden_size, spec.intermediate_size)


def native_decoder(decoder: Decoder, library: Library, team: Team) -> NativeDecoder:
    """Packs the weights of `decoder`, which stays as it is. Raises ValueError where `why_not_native` names a reason."""
    reason = why_not_native(decoder, library)
    if reason is not None:
        raise ValueError(f"the model cannot run natively: {reason}")
    spec = decoder.spec
    half = spec.head_dim // 2
    cos, signed_sin = rope_table(spec.rope, dtype=torch.float32, device=torch.device("cpu"))
    tensors = DecoderTensors(
        embedding=decoder.embedding,
        layers=(_layer_tensors(layer) for layer in decoder.layers),
        intermediate_size=spec.intermediate_size,
        norm=decoder.norm.weight,
        head=decoder.head.plain_weight(),
        cos=cos[:, :half],
        sin=signed_sin[:, half:],
        norm_epsilon=spec.rms_norm_eps,
    )
    return NativeDecoder(library, team, spec.attention, tensors)


def _layer_tensors(layer: DecoderLayer) -> LayerTensors:
    attention, mlp = layer.attention, layer.mlp
    return LayerTensors(
        qkv=attention.qkv.plain_weight(),
        out=attention.out.plain_weight(),
        gate_up=mlp.gate_up.plain_weight(),
        down=mlp.down.plain_weight(),
        input_norm=layer.attention_norm.weight,
        post_norm=layer.mlp_norm.weight,
        qkv_bias=attention.qkv.bias,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
    )
