"""GGUF to Hugging Face: weights, tokenizer and config against what they were made of."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from wheels import gguf_names, write_gguf

from engine.checkpoints import CheckpointError
from engine.checkpoints.gguf_llama import convert_llama, hf_name, to_bfloat16
from engine.models.registry import read_spec

LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}, "rms_norm_eps": 1e-5}


def convert(checkpoint, tmp_path, **changes):
    target = tmp_path / "converted"
    target.mkdir()
    convert_llama(write_gguf(checkpoint, tmp_path / "tiny.gguf", **changes), target)
    return target


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_come_back_as_their_bfloat16(tiny_checkpoint, tmp_path, tied):
    checkpoint = tiny_checkpoint("llama", tie_word_embeddings=tied, **LLAMA)
    converted = convert(checkpoint, tmp_path)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(converted / "model.safetensors")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) != tied
    for name, weight in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], weight.to(torch.bfloat16)), name


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_weights_are_those_of_the_format(tiny_checkpoint, tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    checkpoint = tiny_checkpoint("llama", **LLAMA)
    converted = convert(checkpoint, tmp_path, quantisation=quantisation)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(converted / "model.safetensors")
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.self_attn.k_proj.weight",
    ):
        # Quantisation works within rows, so the order of rows does not matter to it.
        expected = gguf.dequantize(gguf.quantize(before[name].numpy(), quantisation), quantisation)
        assert torch.equal(after[name], torch.from_numpy(expected).to(torch.bfloat16)), name
        assert not torch.equal(after[name], before[name].to(torch.bfloat16))


def test_the_config_carries_every_setting(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("llama", dtype="bfloat16", **LLAMA)
    ours, theirs = read_spec(convert(checkpoint, tmp_path)), read_spec(checkpoint)
    assert ours == theirs
    assert ours.rope.theta == 12345.0
    assert ours.rms_norm_eps == 1e-5


def test_the_tokenizer_gives_the_same_ids(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("llama", **LLAMA)
    converted = convert(checkpoint, tmp_path)
    theirs, ours = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (checkpoint, converted))
    for text in ("the tool returns", "naïve 你好 🙂\n\n  x", "<|im_start|>user\nfile<|im_end|>"):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_digits_stand_alone(tiny_checkpoint, tmp_path):
    """The `smollm` pre-tokenizer; the tiny one has no merges of digits, so it shows in the pieces."""
    tokenizer = Tokenizer.from_file(str(convert(tiny_checkpoint("llama", **LLAMA), tmp_path) / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 12 b")] == ["a", "Ġ", "1", "2", "Ġb"]


def test_rounding_to_bfloat16_is_torchs():
    bits = np.arange(0, 2**32, 65_521 * 3, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    ties = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000000, 0x80000000, 0x7F7FFFFF], dtype=np.uint32)
    values = np.concatenate((values, ties.view(np.float32)))
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.3.attn_q.bias", None),
        ("blk.x.attn_q.weight", None),
        ("blk.1.ffn_gate_inp.weight", None),
        ("rope_freqs.weight", None),
        ("weight", None),
    ],
)
def test_names(name, expected):
    assert hf_name(name) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma"}, ["gemma", "only llama"]),
        ({"pre": "gpt-2"}, ["gpt2/gpt-2", "only gpt2/smollm"]),
        ({"names": [*gguf_names(3), "blk.0.attn_rot_embd.weight"]}, ["blk.0.attn_rot_embd.weight"]),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(tiny_checkpoint, tmp_path, changes, words):
    with pytest.raises(CheckpointError) as caught:
        convert(tiny_checkpoint("llama", **LLAMA), tmp_path, **changes)
    assert all(word in str(caught.value) for word in words)


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    for data in (b"", b"GGUF", b"not a model at all" * 10):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"x\.gguf cannot be read as GGUF"):
            convert_llama(path, tmp_path)


def test_smollm2_is_what_it_should_be(smollm2_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    raw = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    for text in ("Hello world 12345 it's  \n\n  x<|im_end|>\nfoo", "naïve 你好 🙂🙂 ٣٤ 1½", "   lead\ttab"):
        assert tokenizer.encode(text) == raw.encode(text).ids
        assert raw.decode(raw.encode(text).ids, skip_special_tokens=False) == text
    # Pinned: other ids would make every recorded trajectory another text.
    assert raw.encode("Hello world 42").ids == [19556, 905, 216, 36, 34]
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    spec = read_spec(smollm2_dir)
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.max_position) == ("LlamaForCausalLM", 30, 576, 8192)
    assert (spec.eos_token_ids, spec.tie_word_embeddings, spec.rope.theta) == ((2,), True, 100_000.0)


def test_smollm2_answers_sensibly(smollm2_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "The capital of France is Paris." in answer
