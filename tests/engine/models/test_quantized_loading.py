"""Models loaded with `quantization`: which matrices become what, what is then computed, and what tells their KV apart."""

import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from dense_attention import DenseAttention, run
from safetensors.torch import load_file, save_file

from engine.checkpoints import CheckpointError
from engine.models.layers import Linear
from engine.models.registry import load_model
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8

PROMPT = [5, 9, 200, 31, 77, 13]


def matrices(decoder):
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)


def logits_of(loaded):
    return run(loaded.decoder, PROMPT, DenseAttention(loaded.spec))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_quantised_and_the_rest_is_not(tiny_checkpoint, arch, tied, dtype):
    path = tiny_checkpoint(arch, tie_word_embeddings=tied)
    stored = load_file(path / "model.safetensors")
    plain = load_model(path, dtype=dtype)
    for name, bits, quantize in (("int8", 8, quantize_int8), ("int4", 4, quantize_int4)):
        loaded = load_model(path, dtype=dtype, quantization=name)
        assert [(linear.quantized.bits, linear.dtype) for linear in matrices(loaded.decoder)] == [(bits, dtype)] * 12
        assert loaded.decoder.head.quantized.bits == 8
        assert torch.equal(loaded.decoder.embedding, plain.decoder.embedding)
        assert torch.equal(loaded.decoder.norm.weight, plain.decoder.norm.weight)
        # From the weights as they are stored, not as this load rounds them.
        layer = loaded.decoder.layers[1]
        parts = [stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        wanted = quantize(torch.cat(parts))
        assert torch.equal(layer.attention.qkv.quantized.codes, wanted.codes)
        assert torch.equal(layer.attention.qkv.quantized.scale, wanted.scale)
        if arch == "qwen2":
            assert torch.equal(layer.attention.qkv.bias, plain.decoder.layers[1].attention.qkv.bias)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_logits_are_those_of_the_dequantised_weights(tiny_checkpoint, tmp_path, name):
    path = tiny_checkpoint("llama")
    loaded = load_model(path, dtype=torch.float32, quantization=name)
    shutil.copytree(path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    for key, weight in tensors.items():
        if key == "lm_head.weight":
            tensors[key] = quantize_int8(weight).dequantize()
        elif weight.ndim == 2 and "embed" not in key:
            # Groups and channels lie within rows, so that fused and single matrices are quantised alike.
            tensors[key] = (quantize_int8 if name == "int8" else quantize_int4)(weight).dequantize()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    rounded = load_model(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(rounded))
    exact = logits_of(load_model(path, dtype=torch.float32))
    drift = (logits_of(loaded) - exact).norm() / exact.norm()
    assert 0 < drift < (0.05 if name == "int8" else 0.5)


def test_a_quantised_layer_makes_its_weights_when_it_is_called(tiny_checkpoint):
    weight, bias = torch.randn(24, 64), torch.randn(24)
    matrix = quantize_int8(weight)
    layer = Linear.of_quantized(matrix, torch.float32, bias)
    assert layer._ready is None
    assert torch.equal(layer.plain_weight(), matrix.dequantize())
    assert layer._ready is None
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), x @ matrix.dequantize().T + bias)
    assert layer._ready is not None
    assert torch.equal(layer.plain_weight(), matrix.dequantize())
    assert torch.equal(layer(x[:1]), layer(x)[:1])
    assert layer(x[:0]).shape == (0, 24)


def test_inputs_that_are_no_multiple_of_the_group_stay_in_eight_bits(tiny_checkpoint, caplog):
    path = tiny_checkpoint("llama", intermediate_size=80)
    with caplog.at_level(logging.INFO):
        loaded = load_model(path, dtype=torch.float32, quantization="int4")
    for layer in loaded.decoder.layers:
        assert (layer.mlp.down.quantized.bits, layer.mlp.down.quantized.group) == (8, 80)
        assert layer.mlp.gate_up.quantized.bits == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"model.layers.{i}.mlp.down_proj.weight: 80 inputs" in line for i, line in enumerate(warnings)] == [True] * 3
    assert "9 matrices in 4 bits, groups of 32, 4 matrices in 8 bits" in caplog.text


def test_the_fingerprint_covers_the_quantisation(tiny_checkpoint):
    path = tiny_checkpoint("llama")
    prints = [load_model(path, dtype=torch.float32, quantization=name).fingerprint for name in ("none", "int8", "int4")]
    assert len(set(prints)) == 3
    assert load_model(path, dtype=torch.bfloat16, quantization="int8").fingerprint == prints[1]
    assert load_model(path, dtype=torch.float32).fingerprint == prints[0]


def test_weights_that_are_no_numbers_name_the_tensor(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*no finite numbers"):
        load_model(tmp_path / "model", dtype=torch.float32, quantization="int8")


def test_codes_and_weights_never_stand_beside_each_other_whole(tiny_checkpoint):
    """The peak of anonymous memory is that of the codes, the embedding and one matrix in float32."""
    directory = tiny_checkpoint(
        "llama", vocab_size=2000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, tie_word_embeddings=True
    )
    script = f"""
from pathlib import Path
import torch
from engine.models import layers
from engine.models.registry import load_model

torch.set_num_threads(1)

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

held, take = [], layers.take_quantized
layers.take_quantized = lambda *args, **named: (take(*args, **named), held.append(anonymous()))[0]
load_model(Path({str(tiny_checkpoint("llama"))!r}), dtype=torch.bfloat16, quantization="int8")  # loads code
before = anonymous()
load_model(Path({str(directory)!r}), dtype=torch.bfloat16, quantization="int8")
print(max(held) - before)
"""
    # What is freed goes back to the system at once, and is not counted.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    weights = (directory / "model.safetensors").stat().st_size // 4
    assert weights > 30e6
    assert weights < int(result.stdout) < weights * 1.7
