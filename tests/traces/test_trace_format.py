"""The trajectory format: what is written is read back; what is wrong is named by file, line and field."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.format import Timing, TraceFormatError, TurnLine, Usage, decode_line, encode_line, read_lines
from traces.history import DeltaEncoder, HistoryBuilder, rebuild
from traces.index import expand_paths, index_files

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
messages = st.builds(
    lambda role, content, more: {**more, "role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    text | st.none(),
    st.dictionaries(text, values, max_size=2),
)
answers = messages.map(lambda message: {**message, "role": "assistant"})
seconds = st.floats(0, 1e6)
counts = st.integers(0, 10**9)
lines = st.builds(
    TurnLine,
    v=st.just(1),
    session=text.filter(bool),
    turn=counts,
    gap_seconds=seconds,
    keep=st.none() | counts,
    messages=st.lists(messages, max_size=3).map(tuple),
    tools=st.none() | st.lists(st.dictionaries(text, values, max_size=2), max_size=2).map(tuple),
    model=st.none() | text,
    params=st.dictionaries(text, values, max_size=2),
    assistant=answers,
    output_tokens=counts,
    finish_reason=st.none() | text,
    usage=st.none() | st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=st.none() | counts),
    timing=st.none()
    | st.builds(Timing, duration=seconds, time_to_first_token=st.none() | seconds, started_at=st.none() | seconds),
    scripted=st.lists(st.sampled_from(["tool", "arguments", "text"]), unique=True).map(tuple),
)


@given(lines)
def test_line_round_trip(line):
    encoded = encode_line(line)
    assert encoded.endswith(b"\n")
    assert encoded.count(b"\n") == 1
    assert decode_line(encoded) == line
    assert json.loads(encoded)["v"] == 1


@settings(max_examples=150)
@given(st.data())
def test_delta_encoding_gives_every_request_back(data):
    """Sessions that append, rewrite from some message on, or start over; tools that come, change and go."""
    encoder, builder = DeltaEncoder(), HistoryBuilder()
    history = []
    tool_sets = st.lists(st.sampled_from([{"name": "a"}, {"name": "b"}]), max_size=2)
    for turn in range(data.draw(st.integers(1, 6))):
        kept = data.draw(st.integers(0, len(history)))
        request = history[:kept] + data.draw(st.lists(messages, min_size=1, max_size=3))
        tools = data.draw(tool_sets)
        answer = data.draw(answers)
        delta = encoder.encode(request, tools, answer)
        line = TurnLine(
            v=1,
            session="s",
            turn=turn,
            keep=delta.keep,
            messages=delta.messages,
            tools=delta.tools,
            assistant=answer,
            output_tokens=1,
        )
        rebuilt = builder.apply(decode_line(encode_line(line)))
        assert rebuilt.messages == request
        assert list(rebuilt.tools) == tools
        assert encoder.digests == len(request) + 1
        history = [*request, answer]
        if data.draw(st.booleans()):
            encoder.forget()


def test_appending_writes_only_what_is_new():
    encoder = DeltaEncoder()
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answer = {"role": "assistant", "content": "a"}
    tools = [{"type": "function"}]
    assert encoder.encode(first, tools, answer).tools == tuple(tools)
    result = {"role": "tool", "content": "r"}
    delta = encoder.encode([*first, {"content": "a", "role": "assistant"}, result], tools, answer)
    assert (delta.keep, delta.messages, delta.tools) == (None, (result,), None)
    delta = encoder.encode([first[0], result], [], answer)
    assert (delta.keep, delta.messages, delta.tools) == (1, (result,), ())


def good(**changes):
    line = {"v": 1, "session": "s", "turn": 0, "messages": [{"role": "user", "content": "x"}]}
    line |= {"assistant": {"role": "assistant", "content": "y"}, "output_tokens": 3}
    return json.dumps({**line, **changes}) + "\n"


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        (good(v=2), "v", "version 2 is unknown; this program reads version 1"),
        (good(turn="0"), "turn", "expected `int`, got `str`"),
        (good(turn=-1), "turn", "expected 0 or more"),
        (good(session=""), "session", "at least one character"),
        (good(messages=[{"content": "x"}]), "messages[0].role", "a message has a `role`"),
        (good(messages=["x"]), "messages[0]", "expected `object`, got `str`"),
        (good(gap_seconds=-2), "gap_seconds", "finite number of seconds"),
        (good(assistant={"role": "user"}), "assistant.role", "role is 'assistant'"),
        (good(usage={"prompt_tokens": 1}), "usage.completion_tokens", "missing required field"),
        (good(timing={"duration": -1}), "timing.duration", "finite number"),
        (good(colour="red"), "colour", "unknown field"),
        (good(scripted=["mood"]), "scripted[0]", "invalid enum value"),
        (good().replace('"output_tokens": 3', '"output": 3'), "output_tokens", None),
        ("{nonsense\n", None, "no JSON object of a turn"),
        ("[" * 100_000 + "\n", None, None),
        ("\n", None, "the line is empty"),
        (good(keep=1), "keep", "cannot keep 1 messages; the history of session 's' has 0"),
        (good(turn=1), "turn", "expected turn 0 of session 's' here, got 1"),
        (good(messages=[]), "messages", "at least one message"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, field, problem):
    file = tmp_path / "bad.jsonl"
    file.write_text(good(session="other") + text)
    with pytest.raises(TraceFormatError) as caught:
        index_files([file])
    assert str(caught.value).startswith(f"{file}:2: ")
    if problem is not None:
        assert caught.value.field == field
        assert problem in str(caught.value)
    if field is not None and problem is not None:
        assert f"field `{field}`" in str(caught.value)


def test_a_line_that_is_too_long(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(good() + good(session="t", messages=[{"role": "user", "content": "x" * 500}]))
    with pytest.raises(TraceFormatError, match=r"long.jsonl:2: the line is longer than 400 bytes"):
        index_files([file], max_line_bytes=400)
    line = decode_line(good(messages=[{"role": "user", "content": "x" * 500}]).encode())
    with pytest.raises(TraceFormatError, match=r"turn 0 of session 's' takes \d+ bytes; a line holds less than 400"):
        encode_line(line, max_line_bytes=400)


def test_bytes_that_are_no_utf8(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(good().encode().replace(b'"x"', b'"\xe9"'))
    with pytest.raises(TraceFormatError, match=r"latin.jsonl:1: "):
        list(read_lines(file))


def test_what_is_no_json_is_not_written():
    line = decode_line(good().encode())
    with pytest.raises(TraceFormatError, match="is no JSON"):
        encode_line(TurnLine(v=1, session="s", turn=0, messages=({"role": "user", "content": object()},), **rest(line)))
    with pytest.raises(TraceFormatError, match="gap_seconds"):
        encode_line(TurnLine(v=1, session="s", turn=0, messages=line.messages, gap_seconds=math.inf, **rest(line)))
    with pytest.raises(TraceFormatError, match="is no JSON"):
        encode_line(TurnLine(v=1, session="s", turn=0, messages=({"role": "user", "content": "\ud800"},), **rest(line)))


def rest(line):
    return {"assistant": line.assistant, "output_tokens": line.output_tokens}


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(TraceFormatError, match=r"none.jsonl: there is no such file"):
        expand_paths([tmp_path / "none.jsonl"])
    with pytest.raises(TraceFormatError, match=r"holds no .jsonl file"):
        expand_paths([tmp_path])
    with pytest.raises(TraceFormatError, match=r"none.jsonl: cannot be read: No such file"):
        list(read_lines(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TraceFormatError, match="no turns in"):
        index_files(expand_paths([tmp_path]))


def test_the_index_finds_interleaved_sessions(tmp_path):
    file = tmp_path / "two.jsonl"
    tool = {"role": "tool", "content": "r"}
    file.write_text(
        good(session="a", tools=[{"n": 1}])
        + good(session="b")
        + good(session="b", turn=1, messages=[tool])
        + good(session="a", turn=1)
    )
    entries = index_files(expand_paths([tmp_path]))
    assert [(entry.session, entry.turns, entry.output_tokens, list(entry.lines)) for entry in entries] == [
        ("a", 2, 6, [1, 4]),
        ("b", 2, 6, [2, 3]),
    ]
    turns = list(entries[1].read())
    assert [message["role"] for message in turns[1].messages] == ["user", "assistant", "tool"]
    assert list(entries[0].read())[1].tools == ({"n": 1},)
    assert [turn.messages for turn in rebuild(turn.line for turn in turns)] == [turn.messages for turn in turns]


def test_a_session_lives_in_one_file(tmp_path):
    (tmp_path / "1.jsonl").write_text(good())
    (tmp_path / "2.jsonl").write_text(good())
    with pytest.raises(TraceFormatError, match=r"2.jsonl:1: field `session`: session 's' is already in .*1.jsonl"):
        index_files(expand_paths([tmp_path]))
    (tmp_path / "3.jsonl").write_text(good(session="q") + good(session="r"))
    with pytest.raises(TraceFormatError, match="more than 1 sessions"):
        index_files([tmp_path / "3.jsonl"], max_sessions=1)


def test_a_file_that_changes_under_the_reader(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text(good() + good(turn=1))
    (entry,) = index_files([file])
    file.write_text(good())
    with pytest.raises(TraceFormatError, match=r"s.jsonl:2"):
        list(entry.read())
