"""Reasoning in grammars: nothing is a call before it ends, it ends within its budget, and the rest is held afterwards."""

from random import Random

import numpy as np
import pytest

from grammar.compiler import GrammarCompiler, allocate_bitmask
from grammar.formats.registry import format_named
from grammar.thinking import Thinking, ThinkingTags, thinking_tags
from grammar.tools import ResponseFormat, Tool, ToolChoice

AUTO, JSON_OBJECT = ToolChoice("auto"), ResponseFormat("json_object")
WIDTH = 320
TAGS = ThinkingTags(after="\n\n")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [Tool("now", "", {"type": "object", "properties": {}})]


@pytest.fixture(scope="module")
def compiler(tiny_checkpoint):
    made = GrammarCompiler(tiny_checkpoint("llama") / "tokenizer.json", WIDTH, (2,))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_checkpoint("llama") / "tokenizer.json"))


def written(compiler, tokenizer, thinking, text, choice=ToolChoice("required"), answer=ResponseFormat(), tools=TOOLS):
    """Whether the masks allow a whole text."""
    matcher = compiler.compile(format_named("hermes").structural_tag(tools, choice, answer, thinking=thinking)).matcher()
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if token not in allowed(matcher):
            return False
        assert matcher.accept(token)
    return matcher.is_completed()


def allowed(matcher):
    mask = allocate_bitmask(1, WIDTH)
    matcher.fill_bitmask(mask, 0)
    return set(np.nonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))[0].tolist())


def test_the_grammar_holds_after_reasoning_only(compiler, tokenizer):
    for state, begin in (("possible", "<think>"), ("open", "")):
        thinking = Thinking(state, TAGS)
        assert written(compiler, tokenizer, thinking, f"{begin}\nIs <tool_call> right?\n</think>\n\n{CALL}")
        assert not written(compiler, tokenizer, thinking, f"{begin}a</think>\n\nno call")
        assert not written(compiler, tokenizer, thinking, f"{begin}a</think>\n\n<think>b</think>{CALL}")
        assert written(compiler, tokenizer, thinking, f"{begin}a</think>\n\ntext {CALL}", ToolChoice("auto"))
        assert written(compiler, tokenizer, thinking, f"{begin}a</think>\n\n{{}}", AUTO, JSON_OBJECT, [])
        assert not written(compiler, tokenizer, thinking, f"{begin}a</think>\n\nx", AUTO, JSON_OBJECT, [])
    assert written(compiler, tokenizer, Thinking("possible", TAGS), CALL)
    assert not written(compiler, tokenizer, Thinking("open", TAGS), CALL)


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("choice", [ToolChoice("auto"), ToolChoice("required")], ids=["auto", "required"])
def test_reasoning_ends_within_its_budget(compiler, tokenizer, budget, choice):
    """A model that never wants to stop thinking: everything but the end tag, as long as anything else is allowed."""
    thinking = Thinking("open", TAGS, budget)
    ending = set(tokenizer.encode("</think>").ids)
    for seed in range(4):
        random = Random(seed)
        matcher = compiler.compile(format_named("hermes").structural_tag(TOOLS, choice, thinking=thinking)).matcher()
        text = ""
        ids = []
        while "</think>" not in text and len(ids) < 60:
            possible = allowed(matcher)
            plain = sorted(token for token in possible - ending if tokenizer.id_to_token(token).isascii())
            token = random.choice(plain or sorted(possible))
            assert matcher.accept(token)
            ids.append(token)
            text = tokenizer.decode(ids)
        reasoned = text.index("</think>")
        assert len(tokenizer.encode(text[:reasoned], add_special_tokens=False).ids) <= budget
        assert len(ids) <= budget + len("</think>")


def test_a_budget_alone_is_a_grammar_and_no_budget_none():
    hermes = format_named("hermes")
    assert hermes.structural_tag([], thinking=Thinking("possible", TAGS)) is None
    assert '"max_tokens":5' in hermes.structural_tag([], thinking=Thinking("possible", TAGS, 5))
    assert '"max_tokens":5' in format_named("harmony").structural_tag([], thinking=Thinking("possible", None, 5))


def test_tags_are_read_from_the_template():
    assert thinking_tags(None) is None
    assert thinking_tags("{{ messages }}") is None
    assert thinking_tags("x</think>\\n\\n") == ThinkingTags("<think>", "</think>", "\n\n")
    assert thinking_tags("<think></think>x") == ThinkingTags("<think>", "</think>", "")
    mistral = thinking_tags("[THINK]a[/THINK]", frozenset(("[THINK]", "[/THINK]")))
    assert mistral == ThinkingTags("[THINK]", "[/THINK]", "", special=True)
    assert Thinking("open", mistral).words == ()
