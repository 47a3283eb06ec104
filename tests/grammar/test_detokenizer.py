"""The incremental detokenizer against the tokenizer's own decode of everything at once."""

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from grammar.detokenizer import _BYTE_OF, Detokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "def main(): return {'name': 'search', 'arguments': {\"query\": \"weather\"}}\n\n\t",
    "naïve café Ελληνικά Москва 日本語のテキスト 你好,世界 한국어 नमस्ते 😀👩‍👩‍👧 🇩🇪",
]
EXAMPLES = 60
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(decoder=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=ALPHABET, special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("ünïcode 😀", special=False)])
    return tokenizer


def sentencepiece_like(prepend="▁"):
    """Llama 2's: spaces as ▁, bytes for what the vocabulary lacks, one leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in [
        "▁",
        "▁▁",
        "▁▁▁",
        "a",
        "b",
        "c",
        "▁a",
        "▁b",
        "ab",
        "▁ab",
        "é",
        "你",
        "\ufffd",
        ".",
        "▁the",
        "<",
        "x",
        "0",
        "\n",
    ]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(prepend), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁a", -2.0), ("b", -2.0), ("c▁", -3.0), ("é", -3.0)], 0)
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece():
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "##ing", "do", "n't", "run", ".", ",", "'", "s", "##s", "!", "über", "##日"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_suffix():
    """The first GPT's: words end in </w>, and the last token of a text decodes differently."""
    vocab = {"a</w>": 0, "b": 1, "c</w>": 2, "d": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder():
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "": 2, "é": 3}, unk_token="a"))


BUILDERS = {
    "byte_level": byte_level,
    "byte_level_in_sequence": lambda: byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "sentencepiece": sentencepiece_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "word_suffix": word_suffix,
    "no_decoder": no_decoder,
}
TOKENIZERS = {name: build() for name, build in BUILDERS.items()}
REPLACED = byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("o", "0")]))


def cut(seed, ids):
    """The ids in random pieces, empty ones among them."""
    pieces, random = [], Random(seed)
    while ids:
        size = random.randrange(5)
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


def streamed(detokenizer, pieces):
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.lists(st.integers(0, 2**16), max_size=40), seed=st.integers(0, 2**16), skip=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_pieces_join_to_the_whole_decode(name, data, seed, skip):
    tokenizer = TOKENIZERS[name]
    ids = [token_id % (tokenizer.get_vocab_size() + 3) for token_id in data]
    assert "".join(streamed(Detokenizer(tokenizer, skip), cut(seed, ids))) == tokenizer.decode(ids, skip_special_tokens=skip)


HARD = [["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"], ["<0xC3>", "<0xA9>"], ["<0x61>"], ["<0xFF>"], ["<0xE4>"], ["<0x80>"]]
HARD += [["▁"], ["▁▁"], ["▁a"], ["</s>"], ["<s>"], ["\ufffd"], ["b"]]


@given(parts=st.lists(st.sampled_from(HARD), max_size=25), seed=st.integers(0, 2**16), skip=st.booleans())
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_byte_runs_and_spaces_join_to_the_whole_decode(parts, seed, skip):
    """Dense in what is hard for byte fallback: bytes of characters, broken ones, spaces, skipped tokens between them."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.token_to_id(token) for part in parts for token in part]
    assert "".join(streamed(Detokenizer(tokenizer, skip), cut(seed, ids))) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["byte_level"], REPLACED], ids=["byte_level", "replaced"])
@given(text=st.text(max_size=40))
@settings(max_examples=EXAMPLES, deadline=None)
def test_valid_text_never_shows_half_a_character(tokenizer, text):
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text).ids
    seen = ""
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids:
        seen += detokenizer.feed([token_id])
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith(seen)
    assert seen + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in seen


def byte_ids(tokenizer, data):
    """Byte-level tokens of single bytes."""
    character = {byte: text for text, byte in _BYTE_OF.items()}
    return [tokenizer.token_to_id(character[byte]) for byte in data]


def test_a_character_is_held_until_it_is_whole():
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    ids = byte_ids(TOKENIZERS["byte_level"], "a😀é".encode())
    assert [detokenizer.feed([token_id]) for token_id in ids] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.finish() == ""


def test_a_broken_character_is_flushed_once_it_cannot_become_whole():
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    ids = byte_ids(TOKENIZERS["byte_level"], b"\xf0\x9fa\xf0\x9f\x98")
    assert [detokenizer.feed([token_id]) for token_id in ids] == ["", "", "\ufffda", "", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_a_skipped_token_does_not_break_a_character():
    tokenizer = TOKENIZERS["byte_level"]
    first, *rest = byte_ids(tokenizer, "😀".encode())
    ids = [first, tokenizer.token_to_id("<|im_end|>"), *rest]
    assert streamed(Detokenizer(tokenizer), [[token_id] for token_id in ids]) == ["", "", "", "", "😀", ""]


def test_a_run_of_byte_tokens_is_certain_when_another_token_ends_it():
    tokenizer = TOKENIZERS["sentencepiece"]
    smile = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    broken = tokenizer.token_to_id("<0xFF>")
    word = tokenizer.token_to_id("▁ab")
    pieces = [[token_id] for token_id in [*smile, word, *smile, broken, word]]
    assert streamed(Detokenizer(tokenizer), pieces) == ["", "", "", "", "😀 ab", *[""] * 5, "\ufffd" * 5 + " ab", ""]


def test_a_space_after_skipped_tokens_is_not_taken_for_the_first():
    """Only the first token of the text loses its space, wherever special tokens stand."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.token_to_id(token) for token in ("▁a", *["</s>"] * 40, "▁b", "<s>", "▁ab")]
    assert "".join(streamed(Detokenizer(tokenizer), [[token_id] for token_id in ids])) == "a b ab"


def test_fresh_and_copied_detokenizers_go_their_own_ways():
    for name in ("byte_level", "sentencepiece"):
        tokenizer = TOKENIZERS[name]
        if name == "byte_level":
            ids = byte_ids(tokenizer, "日本".encode())
        else:
            ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "日本".encode()]
        original = Detokenizer(tokenizer)
        start = original.feed(ids[:4])
        copied = original.copy()
        assert start + original.feed(ids[4:]) + original.finish() == "日本"
        assert start + copied.feed(ids[4:]) + copied.finish() == "日本"
        assert original.fresh().feed(ids[4:]) + original.fresh().finish() == ("\ufffd\ufffd" if name == "byte_level" else "")


def test_the_byte_alphabet_is_the_tokenizers_own():
    assert sorted(_BYTE_OF) == ALPHABET
    tokenizer = TOKENIZERS["byte_level"]
    for character, byte in _BYTE_OF.items():
        expected = bytes([byte]).decode("utf-8", "replace")
        assert tokenizer.decode([tokenizer.token_to_id(character)]) == expected


@pytest.mark.parametrize("name", ["byte_level", "byte_level_replaced", "sentencepiece", "wordpiece"])
def test_the_window_does_not_grow(name):
    """Ten times the tokens cost about ten times the time, also for tokens that never make a character."""
    tokenizer = REPLACED if name == "byte_level_replaced" else TOKENIZERS[name]
    token_id = tokenizer.token_to_id("<0x80>") if name == "sentencepiece" else 5
    if name.startswith("byte_level"):
        token_id = byte_ids(tokenizer, b"\x80")[0]

    def seconds(count):
        detokenizer = Detokenizer(tokenizer)
        start = time.thread_time()
        for _ in range(count):
            detokenizer.feed([token_id])
        assert len(detokenizer._window) <= 16
        return time.thread_time() - start

    assert seconds(20_000) < 60 * max(seconds(2_000), 1e-3)


def test_real_tokenizer(smollm2_dir):
    """SmolLM2's own vocabulary: every token alone, and a long text token by token."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert detokenizer._rules.byte_level
    for token_id in range(tokenizer.get_vocab_size()):
        one = detokenizer.fresh()
        assert one.feed([token_id]) + one.finish() == tokenizer.decode([token_id], skip_special_tokens=False)
    ids = tokenizer.encode(" ".join(TEXTS) * 3).ids
    assert "".join(streamed(detokenizer, [[token_id] for token_id in ids])) == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_that_are_shown_have_text_and_the_others_none(smollm2_dir):
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    hidden = Detokenizer(tokenizer)
    ids = tokenizer.encode("<|im_start|>a<file_sep>b<|im_end|>").ids
    shown = hidden.showing(["<file_sep>", "no token"])
    assert shown.feed(ids) + shown.finish() == "a<file_sep>b"
    assert hidden.fresh().feed(ids) == hidden.showing([]).feed(ids) == "ab"
    assert hidden.showing(["<file_sep>"]).fresh().feed(ids) == "a<file_sep>b"
