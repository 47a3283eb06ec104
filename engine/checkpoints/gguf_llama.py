"""Converts a GGUF file of a Llama-type model into a Hugging Face directory with bf16 safetensors. Needs no torch.

GGUF (the format of llama.cpp) names tensors differently, stores the rows of q and k in the order that its rotary embedding
wants, and quantises. Dequantising is exact in float32 (package `gguf`, the format's own); rounding to bfloat16 is to nearest,
ties to even.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
from gguf import GGMLQuantizationType, GGUFReader, Keys, ReaderTensor, dequantize

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_blocks import write_blocks
from engine.checkpoints.gguf_fields import optional_field, required_field
from engine.checkpoints.gguf_tokenizer import write_tokenizer
from engine.checkpoints.progress import Report, silent

STAGE = "Converting"

ScalarT = TypeVar("ScalarT", bound=np.generic)
_FLOATS = tuple(GGMLQuantizationType[name] for name in ("F64", "F32", "F16", "BF16"))

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama(gguf_file: Path, directory: Path, *, report: Report = silent) -> None:
    """Writes config.json, generation_config.json, tokenizer files and model.safetensors into `directory`, and what is quantised
    in the GGUF file also as it is (engine.checkpoints.gguf_blocks).

    Raises CheckpointError for another architecture, an unknown tensor, or a file that is no GGUF.
    """
    source = gguf_file.name
    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source} cannot be read as GGUF ({error}); fetch it again.") from error
    architecture = required_field(reader, Keys.General.ARCHITECTURE, str, source)
    if architecture != "llama":
        raise CheckpointError(f"{source} holds a {architecture} model; only llama models can be converted.")
    config = _config(reader, source)
    write_tokenizer(reader, directory, source=source)
    (directory / "config.json").write_bytes(_pretty(config))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    (directory / "generation_config.json").write_bytes(_pretty(generation))
    _write_weights(reader, config, directory / "model.safetensors", source, report)
    write_blocks(directory, _blocks(reader, config))


def _config(reader: GGUFReader, source: str) -> dict[str, Any]:
    def number(template: str, kind: type[Any]) -> Any:
        return required_field(reader, template.format(arch="llama"), kind, source)

    hidden, heads = number(Keys.LLM.EMBEDDING_LENGTH, int), number(Keys.Attention.HEAD_COUNT, int)
    if optional_field(reader, Keys.Rope.SCALING_TYPE.format(arch="llama"), "none") != "none":
        raise CheckpointError(f"{source} scales its rotary embedding; the conversion does not carry that over.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": optional_field(reader, Keys.Tokenizer.BOS_ID, None),
        "eos_token_id": optional_field(reader, Keys.Tokenizer.EOS_ID, None),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number(Keys.LLM.FEED_FORWARD_LENGTH, int),
        "max_position_embeddings": number(Keys.LLM.CONTEXT_LENGTH, int),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": number(Keys.LLM.BLOCK_COUNT, int),
        "num_key_value_heads": number(Keys.Attention.HEAD_COUNT_KV, int),
        "pad_token_id": optional_field(reader, Keys.Tokenizer.PAD_ID, None),
        "rms_norm_eps": _shortest(number(Keys.Attention.LAYERNORM_RMS_EPS, float)),
        "rope_scaling": None,
        "rope_theta": _shortest(number(Keys.Rope.FREQ_BASE, float)),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "vocab_size": number(Keys.LLM.VOCAB_SIZE, int),
    }


def _write_weights(reader: GGUFReader, config: dict[str, Any], path: Path, source: str, report: Report) -> None:
    total = sum(int(tensor.n_elements) * 2 for tensor in reader.tensors)
    done = 0
    weights: dict[str, npt.NDArray[np.uint16]] = {}
    report(STAGE, 0, total)
    for name, weight in _weights(reader, config, source):
        if not np.isfinite(weight).all():
            raise CheckpointError(f"{source}: tensor {name} holds values that are no numbers; fetch the file again.")
        weights[name] = to_bfloat16(weight)
        done += weight.size * 2
        report(STAGE, done, total)
    # numpy knows no bfloat16, so the file is written from the addresses of the bits; `weights` keeps them alive.
    specs = {
        name: safetensors.TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in weights.items()
    }
    safetensors.serialize_file(specs, str(path), {"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone


def _weights(reader: GGUFReader, config: dict[str, Any], source: str) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if name is None:
            raise CheckpointError(f"{source} holds the tensor {tensor.name}, which a llama model does not have.")
        yield name, _rows_in_order(name, _dequantized(tensor), config)


def _blocks(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, str, npt.NDArray[np.uint8]]]:
    """The quantised matrices: (name, kind, blocks [rows, bytes of a row])."""
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if name is None or tensor.tensor_type in _FLOATS:
            continue
        rows = int(tensor.shape[-1])
        yield name, tensor.tensor_type.name, _rows_in_order(name, tensor.data.view(np.uint8).reshape(rows, -1), config)


def _dequantized(tensor: ReaderTensor) -> npt.NDArray[np.float32]:
    weight: npt.NDArray[np.float32] = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    # GGUF lists dimensions innermost first.
    return weight.reshape(tuple(int(size) for size in reversed(tensor.shape)))


def _rows_in_order(name: str, matrix: npt.NDArray[ScalarT], config: dict[str, Any]) -> npt.NDArray[ScalarT]:
    """Rows as Hugging Face has them."""
    if name.endswith("q_proj.weight"):
        return _halves_apart(matrix, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return _halves_apart(matrix, config["num_key_value_heads"])
    return matrix


def _halves_apart(weight: npt.NDArray[ScalarT], heads: int) -> npt.NDArray[ScalarT]:
    """llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart.

    [head, dim/2, 2, in] -> [head, 2, dim/2, in], all flat in the first dimension.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that a Llama does not have."""
    stem, dot, kind = gguf_name.rpartition(".")
    if not dot or kind != "weight":
        return None
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.weight"
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk" or not number.isdecimal() or part not in _LAYER_NAMES:
        return None
    return f"model.layers.{number}.{_LAYER_NAMES[part]}.weight"


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite float32 values rounded to bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))
