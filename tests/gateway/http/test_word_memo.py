"""The memo of words gives what the tokenizer gives, for the ways of cutting words that well-known models have."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from gateway.chunk_memo import cuts_at_spaces
from gateway.word_memo import WordMemo

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern, behavior="isolated"):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


WAYS = {
    "smollm2": None,
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen": split(QWEN),
    "llama3": split(LLAMA),
}
PIECES = st.one_of(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "'s", "'LL", "  ", "\n\n", "\r\n", " 123", "4567", " the", "word", "!?", "\x1c", "\t"]
    ),
    st.text(st.characters(max_codepoint=127), max_size=6),
)


@pytest.fixture(scope="module")
def backend(smollm2_dir):
    text = (smollm2_dir / "tokenizer.json").read_text()

    def make(way):
        tokenizer = Tokenizer.from_str(text)
        if way is not None:
            tokenizer.pre_tokenizer = way
        return tokenizer

    return make


@pytest.mark.parametrize("name", WAYS)
def test_ids_are_those_of_the_tokenizer(backend, name):
    tokenizer = backend(WAYS[name])
    memo = WordMemo.of(tokenizer)
    assert memo is not None

    @settings(max_examples=200, deadline=None)
    @given(st.lists(PIECES, max_size=12))
    def check(pieces):
        text = "".join(pieces)
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        # Twice: with words to ask for, and with all of them known.
        for _ in range(2):
            assert np.frombuffer(memo.encode(text), dtype="<u4").tolist() == expected

    check()


@pytest.mark.parametrize("name", WAYS)
def test_text_is_cut_at_single_spaces_and_nowhere_else(backend, name):
    tokenizer = backend(WAYS[name])
    memo = WordMemo.of(tokenizer)
    assert memo._encode_piece != memo._by_words
    glue = st.sampled_from([" "] * 12 + ["  ", "   ", "\n", " \n", "\n ", "\n\n", "\t", " \t", "\x0c ", "\x1c", " \x1c", ""])
    word = st.sampled_from(["the", "it's", "'s", "1", "123", "4567", "a1", "x.", "...", '{"k":', "[1,", "-", "\x1c", "don't,"])

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.tuples(word, glue), max_size=30), glue)
    def check(pairs, first):
        text = first + "".join(part for pair in pairs for part in pair)
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        for _ in range(3):
            assert np.frombuffer(memo.encode(text), dtype="<u4").tolist() == expected

    check()
    # What is known is used: it does not go by the expression any more.
    text = "".join([" the", " x.", " it's"] * 20)
    ids = memo.encode(text)
    memo._encode_piece.__self__._by_words = None
    assert memo.encode(text) == ids


def test_expressions_that_may_cut_elsewhere_are_not_cut_at_spaces():
    assert cuts_at_spaces(QWEN)
    assert cuts_at_spaces(LLAMA)
    for other in (r" ?\p{L}+ ?|\s+", r"[^a]+|a", r"\p{L}+(?= )|\s+", QWEN + "|.", ""):
        assert not cuts_at_spaces(other)


def test_a_long_text_is_learnt_in_one_go(backend):
    tokenizer = backend(None)
    memo = WordMemo.of(tokenizer)
    words = ["".join(pair) for pair in itertools.permutations("abcdefghijklmnopqrstu", 2)]
    text = " ".join(words)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert np.frombuffer(memo.encode(text), dtype="<u4").tolist() == expected
    assert len(memo._known) > 300
    for _ in range(30):
        assert np.frombuffer(memo.encode(text), dtype="<u4").tolist() == expected
    assert np.frombuffer(memo.encode(text), dtype="<u4").tolist() == expected


def test_other_text_goes_to_the_tokenizer(backend):
    memo = WordMemo.of(backend(None))
    assert memo.encode("naïve") is None
    assert memo.encode("a" * (2**20 + 1)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", split(QWEN, "merged_with_next")),
        lambda t: setattr(t, "pre_tokenizer", split(r"\p{L}+|\b.")),
        lambda t: setattr(t, "pre_tokenizer", split(r"\p{L}+|\s+")),
        lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
        lambda t: t.add_special_tokens([AddedToken("<x>", lstrip=True, normalized=False)]),
        lambda t: t.add_tokens([AddedToken("zebra", single_word=True)]),
        lambda t: setattr(t.model, "dropout", 0.1),
    ],
)
def test_a_tokenizer_that_is_not_understood_has_no_memo(backend, change):
    tokenizer = backend(WAYS["gpt2"])
    change(tokenizer)
    assert WordMemo.of(tokenizer) is None
