"""A body that is parsed from where it goes on is parsed as if it were parsed whole."""

import json
import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis import body_memo
from gateway.apis.body_memo import BodyMemo, Remembered
from gateway.apis.openai.chat_request import _messages
from sessions.digests import message_digests

LONG = "word " * 2000


def remember(memo, tenant, raw):
    """As a turn does it. What it would take the body for."""
    found = memo.parse(tenant, raw)
    body, seen = found if found is not None else (orjson.loads(raw), Remembered(tenant, raw))
    _, messages, digests, warnings = _messages(body, seen)
    memo.keep(seen, messages, digests, warnings, body["messages"])
    return body, messages, digests, warnings, found is not None


def plain(raw):
    body = orjson.loads(raw)
    _, messages, _, warnings = _messages(body, None)
    return body, messages, message_digests(messages), warnings


texts = st.text(max_size=30) | st.sampled_from(['"messages":[', "\\", "]", "},{", "\u2028", "\x7f", "é😀"])
contents = st.one_of(texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2))
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": contents}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | texts, "reasoning_content": texts}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {
                        "id": st.just("call_1"),
                        "type": st.just("function"),
                        "function": st.fixed_dictionaries(
                            {"name": st.just("f"), "arguments": st.sampled_from(['{"messages":[]}', "{}"])}
                        ),
                    }
                ),
                min_size=1,
                max_size=2,
            ),
        }
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("call_1")}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(st.just({"type": "odd"}), max_size=1)}),
)
extras = st.dictionaries(
    st.sampled_from(["model", "temperature", "user", "tools", "metadata", "max_tokens"]),
    st.sampled_from(["m", 1, None, [{"type": "function", "function": {"name": "messages"}}], {"messages": [1]}]),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["grow", "edit", "cut", "again", "other"]), st.lists(messages, max_size=3)), max_size=6
    ),
    before=extras,
    after=extras,
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", "\t: ")]),
    indent=st.sampled_from([None, None, 1]),
    ascii_only=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_conversation_in_any_writing(steps, before, after, separators, indent, ascii_only, seed):
    memo, drawn = BodyMemo(10**7), random.Random(seed)
    conversation = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
    for step, new in steps:
        if step == "grow":
            conversation = conversation + new
        elif step == "edit":
            conversation = [*conversation]
            conversation[drawn.randrange(len(conversation))] = {"role": "user", "content": LONG + str(drawn.random())}
        elif step == "cut":
            conversation = conversation[: 1 + drawn.randrange(len(conversation))]
        elif step == "other":
            conversation = [{"role": "user", "content": LONG + "?"}, *new]
        fields = {**before, "messages": conversation, **{key: value for key, value in after.items() if key not in before}}
        if not isinstance(fields.get("temperature"), int | None):
            fields.pop("temperature")
        for name in ("model", "user", "metadata", "tools", "max_tokens"):  # of the right kind, or absent
            right = {"model": str, "user": str, "metadata": dict, "tools": list, "max_tokens": int}[name]
            if not isinstance(fields.get(name), right):
                fields.pop(name, None)
        raw = json.dumps(fields, separators=separators, indent=indent, ensure_ascii=ascii_only).encode()
        assert remember(memo, "t", raw)[:4] == plain(raw)


def conversation_of(turns, **fields):
    history = [{"role": "system", "content": LONG}]
    for turn in range(turns):
        history += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
    return orjson.dumps({"model": "m", "messages": history, "stream": False, **fields})


def test_a_conversation_that_grows_is_parsed_once():
    memo = BodyMemo(10**7)
    hits = [remember(memo, "t", conversation_of(turns))[4] for turns in range(1, 30)]
    assert hits == [False] + [True] * 28
    first, again = remember(memo, "t", conversation_of(29)), remember(memo, "t", conversation_of(29))
    # The very objects, and one entry for the conversation, not one for each turn.
    assert all(one is other for one, other in zip(first[1], again[1], strict=True))
    assert len(memo._entries) == 1
    assert memo.bytes < 3 * len(conversation_of(29)) + 600 * 60


def test_tenants_know_nothing_of_each_other():
    memo = BodyMemo(10**7)
    remember(memo, "a", conversation_of(3))
    assert memo.parse("b", conversation_of(4)) is None
    assert memo.parse("a", conversation_of(4)) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b'"stream":false', b'"messages":[{"role":"user","content":"another"}],"stream":false'),
        lambda raw: raw.replace(b'},{"role":"user","content":"question 4"', b'},,{"role":"user","content":"question 4"'),
        lambda raw: raw.replace(b'"answer 4"}]', b'"answer 4"},]'),
        lambda raw: raw.replace(b'"answer 4"}]', b'"answer 4"}'),
        lambda raw: raw[:-1],
        lambda raw: raw + b"}",
        lambda raw: raw.replace(b"answer 4", b"answer \\ud800"),
        lambda raw: raw.replace(b"word", b"w\\u006frd", 1),
        lambda raw: raw.replace(b"system", b"user", 1),
    ],
)
def test_odd_bodies_are_parsed_whole(change):
    memo = BodyMemo(10**7)
    remember(memo, "t", conversation_of(4))
    assert memo.parse("t", change(conversation_of(5))) is None
    assert memo.parse("t", conversation_of(5)) is not None


@pytest.mark.parametrize(
    "head",
    [b'{"metadata":{"messages":[1]},', b'{"tools":[],', b'{"a\\"":1,', b'{"x":"' + b"y" * 5000 + b'",'],
)
def test_heads_that_are_not_plain_are_not_remembered(head):
    memo = BodyMemo(10**7)
    raw = conversation_of(3).replace(b'{"model":"m",', head)
    remember(memo, "t", raw)
    assert memo.bytes == 0


def test_what_names_messages_twice_is_what_json_says_it_is():
    memo = BodyMemo(10**7)
    raw = conversation_of(3).replace(b'"stream":false', b'"messages":[{"role":"user","content":"the last counts"}]')
    assert [message["content"] for message in remember(memo, "t", raw)[1]] == ["the last counts"]
    assert memo.bytes == 0


def test_an_error_names_the_message_by_its_place_in_the_whole():
    memo = BodyMemo(10**7)
    remember(memo, "t", conversation_of(3))
    raw = orjson.loads(conversation_of(4))
    raw["messages"][8]["role"] = "nobody"
    body, seen = memo.parse("t", orjson.dumps(raw))
    with pytest.raises(Exception, match=r"messages\[8\]\.role: 'nobody' is not a role"):
        _messages(body, seen)
    raw["messages"][8] = 5
    body, seen = memo.parse("t", orjson.dumps(raw))
    with pytest.raises(Exception, match=r"messages\[8\]"):
        _messages(body, seen)


def test_what_is_said_of_a_message_is_said_every_time():
    memo = BodyMemo(10**7)
    history = [{"role": "user", "content": [{"type": "odd"}, {"type": "text", "text": LONG}]}]
    for _ in range(3):
        warnings = remember(memo, "t", orjson.dumps({"messages": history}))[3]
        assert warnings == ("skipped messages[0].content[0]: unknown content type 'odd'",)
        history = [*history, {"role": "user", "content": "more"}]


def test_memory_is_bounded_and_the_least_recent_go(monkeypatch):
    memo = BodyMemo(200_000)
    bodies = [conversation_of(3).replace(b"question 0", b"subject %d" % number) for number in range(100)]
    for raw in bodies:
        remember(memo, "t", raw)
        assert 0 < memo.bytes <= 200_000
    assert memo.parse("t", bodies[0]) is None
    assert memo.parse("t", bodies[-1]) is not None
    assert memo.bytes == sum(entry.nbytes for bucket in memo._entries.values() for entry in bucket.values())
    wide = BodyMemo(10**9)
    remember(wide, "t", conversation_of(3).replace(b"question 0", "é".encode()))
    assert wide.bytes > 4 * len(LONG)
    off = BodyMemo(0)
    remember(off, "t", bodies[0])
    assert off.parse("t", bodies[0]) is None
    # Many that begin alike for long: each lookup compares no more than a few.
    alike = BodyMemo(10**9)
    for raw in bodies:
        remember(alike, "t", raw)
    assert sum(map(len, alike._entries.values())) == body_memo._MAX_ALIKE


@settings(max_examples=60, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=40))
def test_books_balance(plan):
    memo = BodyMemo(90_000)
    for subject, turns in plan:
        remember(memo, "t", conversation_of(turns).replace(b"question 0", b"subject %d" % subject))
        held = [entry for bucket in memo._entries.values() for entry in bucket.values()]
        assert memo.bytes == sum(entry.nbytes for entry in held) <= 90_000
        assert all(memo._entries.values())
