"""Fixtures that several rooms' tests share."""

import json
import os
from pathlib import Path

import pytest

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Replicas that tests start neither compile what earlier ones were asked for nor leave anything for later ones.
os.environ.setdefault("TURNKEEP_ENGINE_KNOWN_TOOLS", "none")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_VOCAB = 320


@pytest.fixture(scope="session")
def model_cache_dir():
    """The cache that `turnkeep model pull` fills on this machine, so that tests do not fetch the model again."""
    return Path(os.environ.get("TURNKEEP_CACHE_DIR") or default_cache_dir())


@pytest.fixture(scope="session")
def smollm2_dir(model_cache_dir):
    """The converted SmolLM2-135M-Instruct; fetched when it is not there."""
    return obtain(DEFAULT_MODEL, model_cache_dir)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Makes tiny random Hugging Face checkpoints with a tokenizer:

    tiny_checkpoint(arch, *, seed=0, dtype="float32", max_shard_size=None, **config overrides) -> directory

    `arch`: llama, mistral, qwen2 or qwen3. Equal calls give one directory, so copy it before you damage it. Every weight,
    bias and norm is random. Ids 0, 1, 2 are <|endoftext|>, <|im_start|> and <|im_end|> (EOS), as in SmolLM2.
    """
    made = {}

    def make(arch, *, seed=0, dtype="float32", max_shard_size=None, **overrides):
        key = (arch, seed, dtype, max_shard_size, json.dumps(overrides, sort_keys=True))
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny-{arch}")
            write_tiny_checkpoint(directory, arch, seed, dtype, max_shard_size, overrides)
            made[key] = directory
        return made[key]

    return make


def write_tiny_checkpoint(directory, arch, seed, dtype, max_shard_size, overrides):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
    }
    if arch == "qwen3":
        settings["head_dim"] = 16
    config = AutoConfig.for_model(arch, **(settings | overrides))
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms stay near one and the rest is large enough for attention and logits to be far from uniform.
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    write_tiny_tokenizer(directory, config.vocab_size)


def write_tiny_tokenizer(directory, vocab_size):
    """Byte-level BPE with a few merges, so that a character may span tokens and a token several characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, TINY_VOCAB),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (
        'the tool returns the name of the file and the answer is in the "arguments" of the call {"name": "read", "path": "a"} '
    )
    tokenizer.train_from_iterator([text * 4], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
