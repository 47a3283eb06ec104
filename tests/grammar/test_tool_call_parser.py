"""The tool-call parser: the same deltas under any cut, nothing lost from what is no call, call order and ids."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.deltas import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.json_scanner import JsonScanner
from grammar.tagged_calls import TaggedCallParser

NAMES = frozenset(("get", "put", "ping"))


def make(parallel=True):
    ids = itertools.count()
    return TaggedCallParser("<tool_call>", "</tool_call>", NAMES, lambda: f"call-{next(ids)}", parallel=parallel)


def parse(pieces, parallel=True):
    parser = make(parallel)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined([*deltas, *parser.finish()])


def joined(deltas):
    """Neighbouring texts and neighbouring arguments of a call as one."""
    out = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments):
            assert last.index == delta.index
            out[-1] = ToolCallArguments(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out


def text_of(deltas):
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def written(name, arguments):
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def check_rules(deltas):
    """Indices count from 0, a call ends before the next one starts, ids are unique, no empty delta."""
    expected, is_open, ids = 0, False, set()
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert not is_open
            assert delta.index == expected
            assert delta.id not in ids
            ids.add(delta.id)
            is_open = True
        elif isinstance(delta, ToolCallArguments):
            assert is_open
            assert delta.index == expected
            assert delta.text
        elif isinstance(delta, ToolCallEnd):
            assert is_open
            assert delta.index == expected
            expected, is_open = expected + 1, False
        else:
            assert isinstance(delta, TextDelta)
            assert not is_open
            assert delta.text
    assert not is_open


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            "</",
            "<",
            "\n",
            " ",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ":",
            ",",
            "😀",
            "é",
        ),
        *(
            '{"name": "get", "arguments": {',
            '{"arguments": {"a": 1}, "name": "put"}',
            '"name"',
            '"arguments"',
            '"get"',
            '"nope"',
        ),
        *(
            written("get", '{"a": "</tool_call>"}'),
            written("ping", "{}"),
            '{"name": "ping"}',
            "1",
            "-",
            "0.5e",
            "tru",
            "null",
            "漢字",
        ),
    ]
)
NOISE = st.lists(FRAGMENTS, max_size=14).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6) | st.sampled_from(["</tool_call>", "}{", '"']), JSON_VALUES, max_size=4)
DUMPED = st.tuples(ARGUMENTS, st.booleans(), st.sampled_from([None, 2])).map(
    lambda made: json.dumps(made[0], ensure_ascii=made[1], indent=made[2])
)


@st.composite
def cuts(draw, text):
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.booleans())
def test_any_text_gives_the_same_deltas_under_any_cut(data, parallel):
    text = data.draw(NOISE)
    whole = parse([text], parallel)
    check_rules(whole)
    assert parse(text, parallel) == whole  # a character at a time
    assert parse(data.draw(cuts(text)), parallel) == whole


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.tuples(st.sampled_from(sorted(NAMES)), DUMPED), min_size=1, max_size=3))
def test_calls_come_back_as_written_under_any_cut(data, calls):
    before = data.draw(st.sampled_from(["", "I look. ", "漢字\n\n", "a < b"]))
    text = before + "\n".join(written(name, arguments) for name, arguments in calls)
    deltas = parse(data.draw(cuts(text)))
    check_rules(deltas)
    expected = [TextDelta(before.rstrip())] if before else []
    for i, (name, arguments) in enumerate(calls):
        expected += [ToolCallStart(i, f"call-{i}", name), ToolCallArguments(i, arguments), ToolCallEnd(i)]
    assert deltas == expected


def test_truncation_at_every_point_keeps_what_was_written():
    arguments = '{"a": {"b": ["}", "</tool_call>", "\\"{"]}, "é😀": "漢"}'
    head = "Text.\n<tool_call>"
    text = "Text.\n" + written("get", arguments)
    starts = text.index(arguments)
    for end in range(len(text) + 1):
        deltas = parse(text[:end])
        check_rules(deltas)
        assert deltas == parse(list(text[:end]))
        if end >= starts:
            given_arguments = text[starts : min(end, starts + len(arguments))]
            complete = end > starts + len(arguments)
            assert deltas[0] == TextDelta("Text.")
            assert deltas[1] == ToolCallStart(0, "call-0", "get")
            assert "".join(d.text for d in deltas if isinstance(d, ToolCallArguments)) == given_arguments
            assert deltas[-1] == ToolCallEnd(0, complete=complete)
        elif not any(isinstance(delta, ToolCallStart) for delta in deltas):
            assert text_of(deltas) == text[:end]
        else:
            assert '"get"' in text[len(head) : end]
            assert deltas[-1] == ToolCallEnd(0, complete=False)


def test_arguments_stream_before_the_call_is_over():
    parser = make()
    assert parser.feed('<tool_call>{"name": "get", "arguments": ') == []
    assert parser.feed('{"a": "on') == [ToolCallStart(0, "call-0", "get"), ToolCallArguments(0, '{"a": "on')]
    assert parser.feed("e") == [ToolCallArguments(0, "e")]


@pytest.mark.parametrize(
    "text",
    [
        *("<tool_call>", "<tool_call>\n", "<tool_call></tool_call>", "<tool_call>nonsense</tool_call> and more"),
        *(
            "<tool_call>[]</tool_call>",
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            "<tool_cal",
            "a <tool_call",
        ),
        *('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>'),
        *('<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"arguments": {"a": 01}, "name": "get"}</tool_call>'),
        *("<tool_call>{'name': 'get'}</tool_call>", '<tool_call>{"name": "get",}</tool_call>', "  \n <tool_call> {] \n  "),
        *('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "get", "name": "put"}', "<tool_call><tool_call><tool_call>"),
        *(
            '<tool_call>{"name": "get" "arguments": {}}',
            '{"name": "get", "arguments": {}}',
            "</tool_call>\n</tool_call>",
            " \n ",
        ),
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(text):
    for pieces in ([text], list(text)):
        deltas = parse(pieces)
        assert {type(delta) for delta in deltas} == {TextDelta}
        assert text_of(deltas) == text


@settings(max_examples=300, deadline=None)
@given(NOISE)
def test_malformed_text_loses_nothing_but_white_space_and_tags_of_calls(text):
    """What remains when the pieces of parsed calls and white space are taken out of the text is the text."""
    deltas = parse([text])
    if not any(isinstance(delta, ToolCallStart) for delta in deltas):
        assert text_of(deltas) == text
        return
    squeezed = re.sub(r"\s", "", text)
    at = 0
    for delta in deltas:  # every piece that is given out stands in the text, in order
        if isinstance(delta, TextDelta) or (isinstance(delta, ToolCallArguments) and delta.text != "{}"):
            piece = re.sub(r"\s", "", delta.text)
            found = squeezed.find(piece, at)
            if found < 0:  # arguments that came before their name
                found = squeezed.find(piece)
            assert found >= 0
            at = found


def test_a_good_call_after_a_bad_one_is_still_found():
    text = "<tool_call>oops</tool_call> " + written("ping", "{}")
    assert parse([text]) == [
        TextDelta("<tool_call>oops</tool_call>"),
        ToolCallStart(0, "call-0", "ping"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
    ]


def test_a_call_that_breaks_in_its_arguments_ends_incomplete_and_the_rest_is_text():
    text = '<tool_call>{"name": "get", "arguments": {"a": oops}} then ' + written("put", "{}")
    assert parse([text]) == parse(text)
    assert parse([text]) == [
        ToolCallStart(0, "call-0", "get"),
        ToolCallArguments(0, '{"a": '),
        ToolCallEnd(0, complete=False),
        TextDelta("oops}} then"),
        ToolCallStart(1, "call-1", "put"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1),
    ]


@pytest.mark.parametrize("body", ['{"name": "ping"}', '{"name": "ping", "arguments": {}}', '{"arguments": {}, "name": "ping"}'])
def test_a_call_without_arguments_has_an_empty_object(body):
    assert parse([f"<tool_call>{body}</tool_call>"]) == [
        ToolCallStart(0, "call-0", "ping"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
    ]


def test_only_the_first_call_counts_without_parallel_calls():
    text = written("get", "{}") + "\n" + written("put", "{}") + " and text"
    assert parse([text], parallel=False) == [ToolCallStart(0, "call-0", "get"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]


def test_white_space_next_to_calls_is_dropped_and_elsewhere_kept():
    text = "  a  b \n\n" + written("ping", "{}") + "\n \n" + written("ping", "{}") + "\n\n c \n"
    deltas = parse([text])
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == ["  a  b", "c \n"]


@settings(max_examples=200, deadline=None)
@given(st.data(), DUMPED)
def test_the_scanner_ends_where_json_ends(data, text):
    scanner = JsonScanner()
    consumed = 0
    for piece in data.draw(cuts(text + "}</tool_call>")):
        consumed += scanner.feed(piece)
    assert scanner.done
    assert not scanner.failed
    assert consumed == len(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:\\ue0123-+.truefalsn \n', max_size=24).map(lambda text: text.strip(" \n")))
def test_the_scanner_accepts_what_json_accepts(text):
    scanner = JsonScanner()
    end = scanner.feed(text + "\n")
    try:
        json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        valid = True
    except ValueError:
        valid = False
    assert (scanner.done and text[end:].strip(" \n") == "") == valid


def test_the_scanner_takes_any_depth():
    scanner = JsonScanner()
    text = "[" * 100_000 + "]" * 100_000
    assert scanner.feed(text) == len(text)
    assert scanner.done
