"""Thinking regions before an answer, however the text is cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.parser import TextParser
from grammar.reasoning import ReasoningSplitter
from grammar.tagged_calls import TaggedCallParser


def split(pieces, inside=False, inner=None):
    splitter = ReasoningSplitter(inner or TextParser(), inside=inside)
    deltas = [delta for piece in pieces for delta in splitter.feed(piece)]
    deltas += splitter.finish()
    return [kind("".join(delta.text for delta in group)) for kind, group in itertools.groupby(deltas, type)]


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, [ReasoningDelta("hm"), TextDelta("Yes.")]),
        ("hm </think> Yes.", True, [ReasoningDelta("hm"), TextDelta("Yes.")]),
        ("\n <think>a <b> </thin c</think>", False, [ReasoningDelta("a <b> </thin c")]),
        ("Yes <think>no</think>", False, [TextDelta("Yes <think>no</think>")]),
        ("  Yes", False, [TextDelta("  Yes")]),
        ("<thin", False, [TextDelta("<thin")]),
        ("<think>cut </thi", False, [ReasoningDelta("cut </thi")]),
        ("<think></think>Yes", False, [TextDelta("Yes")]),
        ("<think>a</think>b</think>", False, [ReasoningDelta("a"), TextDelta("b</think>")]),
        ("", True, []),
        (" \n", False, [TextDelta(" \n")]),
    ],
)
def test_reasoning_is_split_off(text, inside, expected):
    assert split([text], inside) == expected
    assert split(text, inside) == expected


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "<", " ", "\n", "a", "漢", "😀"])


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=10).map("".join), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_reasoning_is_the_same_under_any_cut(text, ends, inside):
    ends = sorted(min(end, len(text)) for end in ends)
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
    assert split(pieces, inside) == split([text], inside) == split(text, inside)


def test_calls_are_looked_for_after_the_reasoning_only():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    splitter = ReasoningSplitter(TaggedCallParser("<tool_call>", "</tool_call>", frozenset("f"), lambda: "id"))
    deltas = [*splitter.feed(f"<think>maybe {call}</think>\n{call}"), *splitter.finish()]
    assert deltas == [ReasoningDelta(f"maybe {call}"), ToolCallStart(0, "id", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]
