"""Token ids against transformers' tokenizers for the same directories."""

import json

import pytest
from fake_dispatcher import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gateway.config import ModelConfig
from gateway.models import ModelRegistry, ServedModel
from gateway.tokenization import ModelFilesError, TextTokenizer, read_tokenizer_files
from gateway.turn import TurnError

TEXTS = ["", "hello", " two  spaces ", "日本語 🙂", "<|im_start|>user\nhi<|im_end|>", "a\tb\r\nc", "don't 12345"]
CHAT = [{"role": "user", "content": "Hello, how are you? 🙂"}, {"role": "assistant", "content": "Fine."}, {"role": "user"}]


def with_config(directory, **fields):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", **fields}))
    return directory


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<|new|>", "lstrip": False, "rstrip": False, "normalized": False}},
    ],
)
def test_ids_are_those_of_transformers(tmp_path, fields, adds_bos):
    directory = with_config(write_model(tmp_path, adds_bos=adds_bos), **fields)
    ours, theirs = TextTokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs(text, add_special_tokens=special)["input_ids"], text
    assert ours.size == len(theirs)
    assert dict(ours.files.special_tokens) == dict(theirs.special_tokens_map)


def test_the_embedded_model(smollm2_dir):
    ours, theirs = TextTokenizer.load(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs(text, add_special_tokens=special)["input_ids"]
    model = ServedModel.load(ModelConfig("smollm2", smollm2_dir))
    chat = [{**message, "content": message.get("content", "Thanks")} for message in CHAT]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode(model.renderer.render(chat), add_special_tokens=False) == list(expected)
    assert not model.renderer.traits().shows_tools
    assert model.tokenizer.eos_token_ids == {2}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_decoding_undoes_encoding(tiny_model, text):
    tokenizer = TextTokenizer.load(tiny_model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_single_tokens(tiny_model):
    tokenizer = TextTokenizer.load(tiny_model)
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert (tokenizer.token_bytes(first), tokenizer.token_bytes(second)) == (b"\xc3", b"\xa9")
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tokenizer.decode([10**6])
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800", add_special_tokens=False)


def test_spaces_of_sentencepiece_vocabularies(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "\u2581the": 1, "cat": 2, "<0xE2>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = TextTokenizer.load(tmp_path)
    assert ours.token_text(1) == " the"
    assert ours.token_bytes(1) == b" the"
    assert ours.token_text(2) == "cat"
    assert ours.token_bytes(3) == b"\xe2"


def test_files_of_a_model(tmp_path):
    directory = write_model(tmp_path / "m", template=None)
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [258, 256], "max_length": 5})
    )
    (directory / "chat_template.jinja").write_text("A")
    (directory / "chat_templates").mkdir()
    (directory / "chat_templates" / "tool_use.jinja").write_text("B")
    files = read_tokenizer_files(directory)
    assert dict(files.chat_templates) == {"default": "A", "tool_use": "B"}
    assert dict(files.sampling_defaults) == {"temperature": 0.6, "top_k": 20}
    assert files.eos_token_ids == (258, 256)
    assert TextTokenizer(files).eos_token_ids == {256, 258}
    (directory / "generation_config.json").write_text('{"temperature": 0.6}')
    assert dict(read_tokenizer_files(directory).sampling_defaults) == {}


def test_templates_in_the_config(tmp_path):
    directory = with_config(write_model(tmp_path), chat_template=[{"name": "default", "template": "x"}, {"name": 5}, "odd"])
    assert dict(read_tokenizer_files(directory).chat_templates) == {"default": "x"}


def test_damaged_directories_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ModelFilesError, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    directory = write_model(tmp_path / "m")
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelFilesError, match="is not valid JSON"):
        TextTokenizer.load(directory)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFilesError, match="must hold a JSON object"):
        TextTokenizer.load(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ModelFilesError, match=r"'default' of m is not valid, line 1"):
        ServedModel.load(ModelConfig("m", directory))
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFilesError, match="cannot be read as a tokenizer"):
        TextTokenizer.load(directory)


def test_models_by_name(tiny_model):
    first = ServedModel.load(ModelConfig("a", tiny_model, ("b",)))
    second = ServedModel.load(ModelConfig("c", tiny_model))
    registry = ModelRegistry([first, second])
    assert registry.find(None) is registry.find("a") is registry.find("b") is first
    assert registry.find("c") is second
    with pytest.raises(TurnError, match="Models are: 'a', 'b', 'c'"):
        registry.find("d")
    with pytest.raises(ValueError, match="two models are named 'a'"):
        ModelRegistry([first, first])
    # A gateway whose turns are all for opaque workers has no models of its own, and so no default.
    with pytest.raises(TurnError, match="model: this field is missing"):
        ModelRegistry([]).find(None)
