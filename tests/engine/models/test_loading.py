"""Checkpoints into decoders: shards, dtypes, and every way in which files can be wrong."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from dense_attention import DenseAttention, run
from safetensors.torch import load_file, save_file

from engine.checkpoints import CheckpointError
from engine.models.registry import ARCHITECTURES, load_model, read_spec

PROMPT = [5, 9, 200, 31, 77, 13]


def copy_of(directory, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(directory, target)
    return target


def logits_of(directory, dtype=torch.float32):
    loaded = load_model(directory, dtype=dtype)
    return run(loaded.decoder, PROMPT, DenseAttention(loaded.spec))


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def refusal(directory):
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, dtype=torch.float32)
    message = str(caught.value)
    assert message[-1] == "."
    assert " " in message
    return message


@pytest.fixture
def sharded(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("qwen2", max_shard_size="100KB"), tmp_path)
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


def test_shards_are_one_model(tiny_checkpoint, sharded):
    assert torch.equal(logits_of(sharded), logits_of(tiny_checkpoint("qwen2")))


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_stored_and_wanted_dtypes_may_differ(tiny_checkpoint, stored, wanted):
    loaded = load_model(tiny_checkpoint("llama", dtype=stored), dtype=wanted)
    assert loaded.decoder.dtype == wanted
    assert loaded.decoder.forward(torch.tensor([3]), torch.tensor([0]), DenseAttention(loaded.spec)).dtype == wanted
    exact = logits_of(tiny_checkpoint("llama", dtype=stored))
    torch.testing.assert_close(logits_of(tiny_checkpoint("llama", dtype=stored), wanted), exact, rtol=0.05, atol=0.5)


def test_the_files_are_let_go_of(tiny_checkpoint, tmp_path):
    """The decoder owns its weights: what happens to the files afterwards does not matter."""
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    loaded = load_model(directory, dtype=torch.float32)
    before = run(loaded.decoder, PROMPT, DenseAttention(loaded.spec))
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(run(loaded.decoder, PROMPT, DenseAttention(loaded.spec)), before)


def test_progress_reaches_its_total(sharded):
    seen = {}
    load_model(sharded, dtype=torch.float32, report=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)))
    assert list(seen) == ["Hashing", "Loading"]
    done, total = seen["Loading"][-1]
    assert done == total > 0


def test_unknown_architecture_names_those_there_are(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    change_config(directory, architectures=["MambaForCausalLM"])
    message = refusal(directory)
    assert "MambaForCausalLM" in message
    assert ARCHITECTURES == ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    assert all(name in message for name in ARCHITECTURES)


def test_model_type_serves_where_architectures_is_absent(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("qwen3"), tmp_path)
    change_config(directory, architectures=...)
    assert read_spec(directory).architecture == "Qwen3ForCausalLM"
    change_config(directory, model_type="mamba")
    assert "mamba" in refusal(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "positive integer", "'64'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"num_attention_heads": 0}, ["num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "positive number"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised", "bf16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list of strings"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "object"]),
    ],
)
def test_a_wrong_field_is_named(tiny_checkpoint, tmp_path, changes, words):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    (directory / "generation_config.json").unlink()
    change_config(directory, **changes)
    message = refusal(directory)
    for word in ["config.json", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"layer_types": ..., "max_window_layers": "all"}, "max_window_layers"),
    ],
)
def test_wrong_windows_are_named(tiny_checkpoint, tmp_path, changes, word):
    directory = copy_of(tiny_checkpoint("qwen2"), tmp_path)
    change_config(directory, **changes)
    assert word in refusal(directory)


def test_eos_ids_come_from_the_generation_config_first(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 7]}))
    spec = read_spec(directory)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((7, 5), 1)
    (directory / "generation_config.json").unlink()
    assert read_spec(directory).eos_token_ids == (2,)


def test_missing_config(tmp_path):
    message = refusal(tmp_path)
    assert "config.json" in message
    assert "missing" in message


def test_config_that_is_no_json(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    (directory / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(directory)
    (directory / "config.json").write_text("[]")
    assert "no JSON object" in refusal(directory)


def test_missing_weights(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(directory)
    (directory / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_shard_names_the_file(sharded, keep):
    path = sorted(sharded.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    message = refusal(sharded)
    assert path.name in message
    assert "truncated" in message


def test_shard_with_bytes_too_many(sharded):
    path = sorted(sharded.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes() + b"\0")
    assert "longer than it should be" in refusal(sharded)


def test_damaged_header(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("[")
    path.write_bytes(data)
    assert "damaged safetensors header" in refusal(directory)


def test_missing_shard_names_the_file(sharded):
    path = sorted(sharded.glob("*.safetensors"))[2]
    path.unlink()
    message = refusal(sharded)
    assert path.name in message
    assert "missing" in message


def test_index_that_lies(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))[:2]
    name = next(key for key, value in content["weight_map"].items() if value == first)
    content["weight_map"][name] = second
    index.write_text(json.dumps(content))
    message = refusal(sharded)
    assert name in message
    assert second in message
    index.write_text("{}")
    assert "index of shards" in refusal(sharded)


def test_index_may_not_lead_out_of_the_directory(sharded, tmp_path):
    outside = tmp_path / "outside.safetensors"
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], outside)
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../outside.safetensors")
    index.write_text(json.dumps(content))
    assert "lies elsewhere" in refusal(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(tiny_checkpoint, tmp_path, name):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    change_weights(directory, lambda tensors: tensors.pop(name))
    message = refusal(directory)
    assert f"lacks the tensor {name}" in message


def test_missing_bias_and_head_norm_are_named(tiny_checkpoint, tmp_path):
    for arch, name in (("qwen2", "self_attn.q_proj.bias"), ("qwen3", "self_attn.k_norm.weight")):
        directory = tmp_path / arch
        shutil.copytree(tiny_checkpoint(arch), directory)
        change_weights(directory, lambda tensors, name=name: tensors.pop(f"model.layers.0.{name}"))
        assert name in refusal(directory)


def test_wrong_shape_names_both(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    change_config(directory, intermediate_size=80)
    message = refusal(directory)
    assert "model.layers.0.mlp.gate_proj.weight" in message
    assert "[96, 64]" in message
    assert "[80, 64]" in message


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen2", {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}),  # biases
        ("llama", {"num_hidden_layers": 2}),
        ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),  # head norms
    ],
)
def test_tensors_without_a_place_are_not_dropped(tiny_checkpoint, tmp_path, arch, changes):
    directory = copy_of(tiny_checkpoint(arch), tmp_path)
    change_config(directory, **changes)
    message = refusal(directory)
    assert "does not have" in message
    assert "more" in message


def test_old_rotary_buffers_are_not_needed(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    before = logits_of(directory)
    change_weights(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits_of(directory), before)


def test_quantised_tensor_is_refused(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama"), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    change_weights(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    message = refusal(directory)
    assert name in message
    assert "F8_E4M3" in message


def test_tied_model_that_brings_its_head_again(tiny_checkpoint, tmp_path):
    directory = copy_of(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path)
    before = logits_of(directory)
    change_weights(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(directory), before)


def test_tied_model_that_brings_another_head(tiny_checkpoint, tmp_path):
    """Like transformers, which then leaves them untied."""
    from dense_attention import reference_logits, reference_model

    directory = copy_of(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path)
    before = logits_of(directory)
    change_weights(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}))
    assert not torch.equal(logits_of(directory), before)
    torch.testing.assert_close(logits_of(directory), reference_logits(reference_model(directory), PROMPT), rtol=0, atol=1e-4)


def test_no_file_is_read_twice_into_memory(tiny_checkpoint):
    """The peak of anonymous memory stays near one copy of the weights: no state dict stands beside the decoder."""
    directory = tiny_checkpoint("llama", vocab_size=20_000, hidden_size=512, intermediate_size=2048)
    script = f"""
from pathlib import Path
import torch
from engine.models import weights
from engine.models.registry import load_model

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

held, before, copy = [], anonymous(), weights.Weights._copy

def watched(self, name, target):
    copy(self, name, target)
    held.append(anonymous())

weights.Weights._copy = watched
load_model(Path({str(directory)!r}), dtype=torch.float32)
print(max(held) - before)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    size = (directory / "model.safetensors").stat().st_size
    assert size > 100e6
    assert size * 0.8 < int(result.stdout) < size * 1.25
