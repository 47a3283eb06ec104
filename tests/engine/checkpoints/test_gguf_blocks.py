"""GGUF blocks beside the checkpoint: kept when it is converted, added to what earlier versions made, and used as they are."""

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_pull import Shop
from wheels import embedded_model, write_gguf, write_wheel

from engine.checkpoints import CheckpointError, catalog, embedded
from engine.checkpoints.cache import MANIFEST, read_manifest
from engine.checkpoints.gguf_blocks import BLOCKS
from engine.checkpoints.gguf_llama import convert_llama
from engine.models.registry import load_model
from engine.quantization.gguf import unpack

Kind = gguf.GGMLQuantizationType
# Rows of 96 and 64 inputs: whole blocks of 32.
LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}, "rms_norm_eps": 1e-5}


def convert(checkpoint, tmp_path, quantisation, kinds=None):
    target = tmp_path / "converted"
    target.mkdir()
    convert_llama(write_gguf(checkpoint, tmp_path / "tiny.gguf", quantisation, kinds), target)
    return target


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_the_formats_own_numbers_bit_for_bit(kind, monkeypatch):
    monkeypatch.setattr("engine.quantization.gguf._CHUNK_BYTES", 500)
    weight = np.random.default_rng(5).standard_normal((37, 160)).astype(np.float32)
    weight[3], weight[4, 32:64] = 0, 0.25
    blocks = gguf.quantize(weight, Kind[kind])
    matrix = unpack(torch.from_numpy(blocks), kind)
    assert (matrix.bits, matrix.group) == (8 if kind == "Q8_0" else 4, 32)
    assert int(matrix.codes.max()) < 2**matrix.bits
    assert torch.equal(matrix.dequantize(), torch.from_numpy(gguf.dequantize(blocks, Kind[kind])))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q6_K", "Q4_K"])
def test_other_kinds_come_in_eight_bits(kind):
    rows, columns = 6, 512
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(9)
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    # Random bytes but for the float16 scales, which are made sensible: at the end for Q6_K, at the front else.
    scales = np.full((rows, columns // block, 1), 0.01, dtype=np.float16).view(np.uint8)
    places = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)}[kind]
    for place in places:
        blocks[..., place : place + 2] = scales
    blocks = blocks.reshape(rows, -1)
    exact = torch.from_numpy(gguf.dequantize(blocks, Kind[kind]))
    matrix = unpack(torch.from_numpy(blocks), kind)
    assert (matrix.bits, matrix.group, matrix.shape) == (8, 32, (rows, columns))
    largest = exact.view(rows, -1, 32).abs().amax(-1, keepdim=True)
    error = (matrix.dequantize() - exact).view(rows, -1, 32).abs()
    assert (error <= largest / 254 * 1.001).all()
    assert exact.abs().max() > 0


@pytest.mark.parametrize(
    ("blocks", "kind", "words"),
    [
        (torch.zeros(2, 21, dtype=torch.uint8), "Q4_1", "21 bytes"),
        (torch.zeros(2, 20, dtype=torch.uint8), "Q9_9", "Q9_9"),
        (torch.zeros(2, 20, dtype=torch.uint8), "", "'' is no kind"),
        (torch.full((2, 20), 0x7C, dtype=torch.uint8), "Q4_1", "no finite numbers"),
    ],
)
def test_blocks_that_are_none_are_refused(blocks, kind, words):
    if kind == "Q4_1":
        blocks[:, 1] = 0x7C  # an infinite scale
        blocks[:, 0] = 0
    with pytest.raises(ValueError, match=words):
        unpack(blocks, kind)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_of_a_converted_model_is_the_files(tiny_checkpoint, tmp_path, kind, tied):
    checkpoint = tiny_checkpoint("llama", tie_word_embeddings=tied, **LLAMA)
    path = convert(checkpoint, tmp_path, Kind[kind])
    original = load_file(checkpoint / "model.safetensors")
    exact = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), Kind[kind]), Kind[kind]))
        for name, weight in original.items()
        if weight.ndim == 2
    }
    decoder = load_model(path, dtype=torch.float32, quantization="gguf").decoder
    for index, layer in enumerate(decoder.layers):
        attn, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        for linear, names in (
            # The rows of q and k come back into Hugging Face's order, which is that of `original`.
            (layer.attention.qkv, [f"{attn}.{part}_proj.weight" for part in "qkv"]),
            (layer.attention.out, [f"{attn}.o_proj.weight"]),
            (layer.mlp.gate_up, [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]),
            (layer.mlp.down, [f"{mlp}.down_proj.weight"]),
        ):
            assert torch.equal(linear.quantized.dequantize(), torch.cat([exact[name] for name in names])), names
            assert (linear.quantized.bits, linear.quantized.group) == (8 if kind == "Q8_0" else 4, 32)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(decoder.head.quantized.dequantize(), exact[head])


def test_fused_matrices_of_several_kinds_come_in_eight_bits(tiny_checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    kinds = {"attn_v": Kind.Q8_0, "ffn_down": Kind.F32, "ffn_up": Kind.F32, "attn_output": Kind.Q5_0}
    checkpoint = tiny_checkpoint("llama", **LLAMA)
    path = convert(checkpoint, tmp_path, Kind.Q4_1, kinds)
    layer = load_model(path, dtype=torch.float32, quantization="gguf").decoder.layers[1]
    original = load_file(checkpoint / "model.safetensors")
    qkv = layer.attention.qkv.quantized
    assert (qkv.bits, qkv.group) == (8, 32)
    v = original["model.layers.1.self_attn.v_proj.weight"].numpy()
    assert torch.equal(
        qkv.dequantize()[-v.shape[0] :], torch.from_numpy(gguf.dequantize(gguf.quantize(v, Kind.Q8_0), Kind.Q8_0))
    )
    q = original["model.layers.1.self_attn.q_proj.weight"].numpy()
    exact = torch.from_numpy(gguf.dequantize(gguf.quantize(q, Kind.Q4_1), Kind.Q4_1))
    torch.testing.assert_close(qkv.dequantize()[: q.shape[0]], exact, rtol=0, atol=float(exact.abs().max()) / 250)
    gate_up = layer.mlp.gate_up.quantized
    assert (gate_up.bits, gate_up.group) == (8, 32)
    up = original["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(gate_up.dequantize()[-up.shape[0] :], up, rtol=0, atol=float(up.abs().max()) / 100)
    assert layer.mlp.down.quantized is None
    assert torch.equal(layer.mlp.down.plain_weight(), original["model.layers.1.mlp.down_proj.weight"].bfloat16().float())
    assert (layer.attention.out.quantized.bits, layer.attention.out.quantized.group) == (8, 32)
    for words in (
        "3 matrices of Q4_1/Q8_0 in 8 bits, groups of 32",
        "3 matrices of Q5_0 in 8 bits, groups of 32",
        "3 matrices half quantised in 8 bits, groups of 32",
        "3 matrices not quantised",
        "1 matrices as Q4_1",
    ):
        assert words in caplog.text


def test_without_blocks_gguf_is_refused_with_a_remedy(tiny_checkpoint):
    with pytest.raises(CheckpointError, match=r"quantized\.blocks.*turnkeep model pull"):
        load_model(tiny_checkpoint("llama"), dtype=torch.float32, quantization="gguf")


def test_blocks_that_do_not_fit_the_config_are_refused(tiny_checkpoint, tmp_path):
    path = convert(tiny_checkpoint("llama", **LLAMA), tmp_path, Kind.Q4_1)
    other = tmp_path / "other"
    other.mkdir()
    wide = tiny_checkpoint("llama", intermediate_size=128, **LLAMA)
    convert_llama(write_gguf(wide, tmp_path / "wide.gguf", Kind.Q4_1), other)
    (other / BLOCKS).rename(path / BLOCKS)
    with pytest.raises(CheckpointError, match=r"\[256, 64\].*\[192, 64\]"):
        load_model(path, dtype=torch.float32, quantization="gguf")


def test_a_file_that_does_not_say_the_kinds_is_refused(tiny_checkpoint, tmp_path):
    path = convert(tiny_checkpoint("llama", **LLAMA), tmp_path, Kind.Q4_1)
    whole = (path / BLOCKS).read_bytes()
    (path / BLOCKS).write_bytes(whole.replace(b'"kinds"', b'"kinks"'))
    with pytest.raises(CheckpointError, match="of which kinds"):
        load_model(path, dtype=torch.float32, quantization="gguf")
    name = b"model.layers.1.mlp.up_proj.weight"
    at = whole.index(name)
    (path / BLOCKS).write_bytes(whole[:at] + whole[at:].replace(name, name.replace(b"1", b"7"), 1))
    with pytest.raises(CheckpointError, match=r"of which kind model\.layers\..*up_proj\.weight is"):
        load_model(path, dtype=torch.float32, quantization="gguf")


def test_the_fingerprint_covers_the_blocks(tiny_checkpoint, tmp_path):
    path = convert(tiny_checkpoint("llama", **LLAMA), tmp_path, Kind.Q4_1)
    first = load_model(path, dtype=torch.float32, quantization="gguf").fingerprint
    plain = load_model(path, dtype=torch.float32).fingerprint
    data = bytearray((path / BLOCKS).read_bytes())
    data[-1] ^= 1
    (path / BLOCKS).write_bytes(data)
    assert load_model(path, dtype=torch.float32, quantization="gguf").fingerprint not in (first, plain)
    assert load_model(path, dtype=torch.float32).fingerprint == plain


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    wheel = write_wheel(
        write_gguf(tiny_checkpoint("llama", **LLAMA), tmp_path / "tiny.gguf", Kind.Q4_1), tmp_path / "tiny-1.0-py3-none-any.whl"
    )
    return embedded_model(wheel), Shop(wheel)


def as_an_earlier_version_made_it(path):
    (path / BLOCKS).unlink()
    manifest = msgspec.to_builtins(read_manifest(path))
    del manifest["blocks"], manifest["files"][BLOCKS]
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def test_what_an_earlier_version_made_is_good_and_gets_its_blocks(model, tmp_path, monkeypatch):
    model, shop = model
    monkeypatch.setattr(catalog, "find_embedded", lambda name: model if name == model.name else None)
    monkeypatch.setattr(embedded, "fetch_with_pip", shop)
    cache = tmp_path / "cache"
    path = embedded.pull_embedded(model, cache)
    weights, blocks = ((path / name).read_bytes() for name in ("model.safetensors", BLOCKS))
    as_an_earlier_version_made_it(path)
    assert catalog.resolve(model.name, cache) == path  # no need to fetch anything
    assert catalog.obtain(path, cache) == path
    load_model(path, dtype=torch.float32)
    assert shop.fetched == 1
    assert catalog.with_blocks(path, cache) == path
    assert shop.fetched == 2
    assert [(path / name).read_bytes() for name in ("model.safetensors", BLOCKS)] == [weights, blocks]
    catalog.with_blocks(path, cache)
    catalog.pull(model.name, cache)
    assert shop.fetched == 2
    load_model(path, dtype=torch.float32, quantization="gguf")
    # A copy elsewhere is not the cache's to replace.
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    as_an_earlier_version_made_it(elsewhere)
    assert catalog.with_blocks(elsewhere, cache) == elsewhere
    assert shop.fetched == 2


def test_what_cannot_be_renewed_stays(model, tmp_path, caplog):
    model, shop = model

    def unreachable(*_):
        raise CheckpointError("The index cannot be reached.")

    path = embedded.pull_embedded(model, tmp_path / "cache", fetch=shop)
    as_an_earlier_version_made_it(path)
    assert embedded.pull_embedded(model, tmp_path / "cache", fetch=unreachable) == path
    assert "cannot be reached" in caplog.text
    load_model(path, dtype=torch.float32)


def test_a_gguf_file_is_a_model(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("llama", **LLAMA)
    file, cache = write_gguf(checkpoint, tmp_path / "my model.gguf", Kind.Q4_1), tmp_path / "cache"
    with pytest.raises(CheckpointError, match="has not been converted"):
        catalog.resolve(str(file), cache)
    path = catalog.obtain(str(file), cache)
    assert path.parent == cache / "models"
    assert path.name.startswith("my model-")
    assert catalog.resolve(file, cache) == path
    assert [model.name for model in catalog.list_models(cache)] == [path.name]
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert catalog.pull(str(file), cache) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    load_model(path, dtype=torch.float32, quantization="gguf")
    # Another file of the same name is another model.
    write_gguf(checkpoint, file, Kind.Q8_0)
    with pytest.raises(CheckpointError, match="has not been converted"):
        catalog.resolve(file, cache)
    assert catalog.obtain(file, cache) not in (None, path)


def test_a_gguf_file_that_cannot_be_converted_leaves_nothing(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and no more")
    with pytest.raises(CheckpointError, match=r"broken\.gguf cannot be read as GGUF"):
        catalog.obtain(str(file), tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
