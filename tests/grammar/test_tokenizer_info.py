"""The vocabulary that grammars see, against XGrammar's own reading of a Hugging Face tokenizer."""

import json

import pytest
import xgrammar
from transformers import AutoTokenizer

from grammar.compiler import tokenizer_info
from grammar.vocabulary import read_vocabulary


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("vocab_size", [49_152, 49_216])
def test_the_vocabulary_is_the_one_xgrammar_reads(smollm2_dir, tokenizer, vocab_size):
    tokens = tokenizer_info(smollm2_dir / "tokenizer.json", vocab_size, [2, 0])
    ours = tokens.info
    theirs = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[2, 0])
    assert ours.vocab_size == theirs.vocab_size == vocab_size
    assert theirs.vocab_type == xgrammar.VocabType.BYTE_LEVEL
    assert ours.vocab_type == xgrammar.VocabType.RAW  # the same bytes, decoded already
    assert ours.add_prefix_space == theirs.add_prefix_space
    assert ours.stop_token_ids == theirs.stop_token_ids == [0, 2]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    differing = {i for i, (a, b) in enumerate(zip(ours.decoded_vocab, theirs.decoded_vocab, strict=True)) if a != b}
    assert differing == special - {0, 2} == set(tokens.specials.values())
    for token_id in differing:  # no text can hold them
        with pytest.raises(UnicodeDecodeError):
            ours.decoded_vocab[token_id].decode()
    assert {
        name: token.content
        for name, token in zip(tokens.specials, map(tokenizer.added_tokens_decoder.get, tokens.specials.values()), strict=True)
    } == {name: name for name in tokens.specials}
    assert set(theirs.special_token_ids) - set(tokens.specials.values()) <= set(ours.special_token_ids)


def test_added_tokens_that_are_not_special_keep_their_text(tiny_checkpoint, tmp_path):
    tokenizer = json.loads((tiny_checkpoint("llama") / "tokenizer.json").read_text())
    added = {
        "id": len(tokenizer["model"]["vocab"]),
        "content": "<tool_call>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    tokenizer["added_tokens"].append({**added, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    vocabulary = read_vocabulary(tmp_path / "tokenizer.json", 384, [2, 2])
    assert vocabulary.tokens[added["id"]] == "<tool_call>"
    assert vocabulary.tokens[:3] == ["", "", "<|im_end|>"]
    assert not any(vocabulary.tokens[added["id"] + 1 :])
    assert len(vocabulary.tokens) == 384
    assert vocabulary.stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("stops", "words"), [([], "at least one stop token"), ([384], "outside the vocabulary"), ([-1], "-1 lies outside")]
)
def test_stop_tokens_have_to_be_in_the_vocabulary(tiny_checkpoint, stops, words):
    with pytest.raises(ValueError, match=words):
        read_vocabulary(tiny_checkpoint("llama") / "tokenizer.json", 384, stops)


def test_a_tokenizer_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path / "tokenizer.json", 384, [2])
