"""The tokenizer of a GGUF file as Hugging Face files: byte-level BPE with the `smollm` pre-tokenizer."""

from __future__ import annotations

from pathlib import Path

import msgspec
from gguf import GGUFReader, Keys, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_fields import optional_field, required_field


def write_tokenizer(reader: GGUFReader, directory: Path, *, source: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json (chat template included) into `directory`.

    Raises CheckpointError for a tokenizer of another kind: which text pieces a pre-tokenizer makes is not in the file, only
    its name, so only a name whose pieces are known can be converted exactly.
    """
    model = required_field(reader, Keys.Tokenizer.MODEL, str, source)
    pre = required_field(reader, Keys.Tokenizer.PRE, str, source)
    if (model, pre) != ("gpt2", "smollm"):
        raise CheckpointError(f"{source} has a tokenizer of kind {model}/{pre}; only gpt2/smollm can be converted.")
    tokens = [str(token) for token in required_field(reader, Keys.Tokenizer.LIST, list, source)]
    kinds = [int(kind) for kind in required_field(reader, Keys.Tokenizer.TOKEN_TYPE, list, source)]
    merges = [str(merge).split(" ", 1) for merge in required_field(reader, Keys.Tokenizer.MERGES, list, source)]

    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[(a, b) for a, b in merges])
    )
    # llama.cpp's `smollm`: every digit by itself, then GPT-2's pattern. Text pieces never cross these borders.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer has {tokenizer.get_vocab_size()} tokens of {len(tokens)}.")
    tokenizer.save(str(directory / "tokenizer.json"))

    config: dict[str, object] = {
        "add_bos_token": bool(optional_field(reader, Keys.Tokenizer.ADD_BOS, False)),
        "add_prefix_space": bool(optional_field(reader, Keys.Tokenizer.ADD_PREFIX, False)),
        "additional_special_tokens": special,
        "chat_template": required_field(reader, Keys.Tokenizer.CHAT_TEMPLATE, str, source),
        "clean_up_tokenization_spaces": False,
        "model_max_length": required_field(reader, Keys.LLM.CONTEXT_LENGTH.format(arch="llama"), int, source),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (
        ("bos_token", Keys.Tokenizer.BOS_ID),
        ("eos_token", Keys.Tokenizer.EOS_ID),
        ("unk_token", Keys.Tokenizer.UNK_ID),
        ("pad_token", Keys.Tokenizer.PAD_ID),
    ):
        index = optional_field(reader, key, None)
        if index is not None:
            config[name] = tokens[int(index)]
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
