"""A body that is parsed from where it goes on is parsed as if it were parsed whole."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace

import orjson
import pytest
from fake_dispatcher import write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reasoning_over_http import TEMPLATE
from xxhash import xxh3_128_digest

from gateway.apis import body_memo
from gateway.apis.body_memo import BodyMemo, Following, Remembered
from gateway.apis.body_pieces import BodyPieces
from gateway.apis.openai.chat_request import parse_chat
from gateway.config import ModelConfig
from gateway.models import ServedModel
from gateway.turn import SessionRef, Turn, TurnError
from sessions.digests import message_digests

LONG = "word " * 2000


@dataclass
class Seen:
    body: dict
    turn: Turn
    options: object
    warnings: list
    known: bool


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """One whose answers do not begin with reasoning, and one whose may."""
    thinking = write_model(tmp_path_factory.mktemp("thinking"), template=TEMPLATE)
    return [ServedModel.load(ModelConfig("m", directory)) for directory in (tiny_model, thinking)]


@pytest.fixture(scope="module")
def model(models):
    return models[0]


def turn_of(model, body, seen):
    warnings = []
    turn, options = parse_chat(
        body, model=model, session=SessionRef("t", None), request_id="r", max_choices=8, warnings=warnings, seen=seen
    )
    return turn, options, warnings


def parsed(memo, tenant, raw, pieces=(5000, 8192, 70000)):
    """A body that comes in pieces of these lengths, and then the rest."""
    following, at = Following(memo, tenant), 0
    for length in (*pieces, len(raw)):
        following.feed(raw[at : at + length])
        at += length
    return memo.parse(following)


def remember(memo, tenant, raw, model, **pieces):
    """As a turn does it."""
    found = parsed(memo, tenant, raw, **pieces)
    body, seen = found if found is not None else (orjson.loads(raw), Remembered(tenant, raw))
    turn, options, warnings = turn_of(model, body, seen)
    memo.keep(seen, body, turn.messages, turn.message_digests)
    return Seen(body, turn, options, warnings, found is not None)


def same_without_a_memory(got, raw, model):
    body = orjson.loads(raw)
    turn, options, warnings = turn_of(model, body, None)
    turn = replace(turn, message_digests=message_digests(turn.messages))
    return (got.body, got.turn, got.options, got.warnings) == (body, turn, options, warnings)


texts = st.text(max_size=30) | st.sampled_from(['"messages":[', "\\", "]", "},{", "\u2028", "\x7f", "é😀"])
contents = st.one_of(texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2))
function = st.fixed_dictionaries({"name": st.just("f"), "arguments": st.sampled_from(['{"messages":[]}', "{}"])})
call = st.fixed_dictionaries({"id": st.just("call_1"), "type": st.just("function"), "function": function})
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": contents}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | texts, "reasoning_content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": st.lists(call, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("call_1")}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(st.just({"type": "odd"}), max_size=1)}),
)
TOOL = {"type": "function", "function": {"name": "messages", "parameters": {"type": "object", "properties": {"messages": {}}}}}
ODD = {"type": "function", "function": {"name": "f", "strict": False, "odd": 1}}
OTHER = {"type": "function", "function": {"name": "g"}}
FIELDS = {
    "model": st.sampled_from(["m", None]),
    "temperature": st.sampled_from([0, 0.5, None]),
    "user": texts,
    "tools": st.sampled_from([[TOOL], [TOOL, ODD], None]),
    "metadata": st.sampled_from([{"messages": [1]}, {}]),
    "max_tokens": st.sampled_from([5, 6]),
    "stream": st.booleans(),
    "reasoning_effort": st.sampled_from(["low", "high", "none"]),
    "thinking_budget": st.sampled_from([7, 9]),
    "chat_template_kwargs": st.sampled_from([{"thinks_at_once": True}, {}]),
    "nobody_knows": st.just([]),
}
extras = st.fixed_dictionaries({}, optional=FIELDS)
STEPS = st.sampled_from(["grow", "grow", "edit", "cut", "again", "other", "fields"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(STEPS, st.lists(messages, max_size=3), extras), max_size=6),
    before=st.sets(st.sampled_from(sorted(FIELDS))),
    extra=extras,
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", "\t: ")]),
    indent=st.sampled_from([None, None, 1]),
    ascii_only=st.booleans(),
    which=st.integers(0, 1),
    seed=st.integers(0, 99),
    pieces=st.lists(st.integers(1, 9000), max_size=8),
)
def test_any_conversation_in_any_writing(models, steps, before, extra, separators, indent, ascii_only, which, seed, pieces):
    memo, drawn = BodyMemo(10**7), random.Random(seed)
    conversation = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
    for step, new, other_fields in steps:
        if step == "grow":
            conversation = conversation + new
        elif step == "edit":
            conversation = [*conversation]
            conversation[drawn.randrange(len(conversation))] = {"role": "user", "content": LONG + str(drawn.random())}
        elif step == "cut":
            conversation = conversation[: 1 + drawn.randrange(len(conversation))]
        elif step == "other":
            conversation = [{"role": "user", "content": LONG + "?"}, *new]
        elif step == "fields":
            extra = other_fields
        first = {name: value for name, value in extra.items() if name in before}
        fields = {**first, "messages": conversation, **extra}
        raw = json.dumps(fields, separators=separators, indent=indent, ensure_ascii=ascii_only).encode()
        assert same_without_a_memory(remember(memo, "t", raw, models[which], pieces=pieces), raw, models[which])


def conversation_of(turns, **fields):
    history = [{"role": "system", "content": LONG}]
    for turn in range(turns):
        history += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
    return orjson.dumps({"model": "m", "messages": history, "stream": False, **fields})


def test_a_conversation_that_grows_is_parsed_once(model):
    memo = BodyMemo(10**7)
    hits = [remember(memo, "t", conversation_of(turns), model).known for turns in range(1, 30)]
    assert hits == [False] + [True] * 28
    first, again = remember(memo, "t", conversation_of(29), model), remember(memo, "t", conversation_of(29), model)
    # The very objects, and one entry for the conversation, not one for each turn.
    assert all(one is other for one, other in zip(first.turn.messages, again.turn.messages, strict=True))
    assert len(memo._entries) == 1
    assert memo.bytes < 3 * len(conversation_of(29)) + 600 * 60


def test_two_models_under_one_memory(models):
    """A client that changes its model in the middle gets what the new one makes of its fields."""
    memo = BodyMemo(10**7)
    for turns in range(1, 8):
        model, raw = models[turns % 2], conversation_of(turns, chat_template_kwargs={"thinks_at_once": True})
        got = remember(memo, "t", raw, model)
        assert got.known == (turns > 1)
        assert same_without_a_memory(got, raw, model)
        assert (got.turn.thinking is None) == (turns % 2 == 0)


def test_fields_are_made_once(model):
    memo = BodyMemo(10**7)
    seen = [remember(memo, "t", conversation_of(turns, tools=[ODD], n=1), model) for turns in range(1, 6)]
    assert all(one.turn.tools is seen[0].turn.tools and one.turn.sampling is seen[0].turn.sampling for one in seen)
    other = remember(memo, "t", conversation_of(6, tools=[ODD, OTHER], n=1), model)
    assert other.known
    assert [tool.name for tool in other.turn.tools] == ["f", "g"]


def test_tenants_know_nothing_of_each_other(model):
    memo = BodyMemo(10**7)
    remember(memo, "a", conversation_of(3), model)
    assert parsed(memo, "b", conversation_of(4)) is None
    assert parsed(memo, "a", conversation_of(4)) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b'"stream":false', b'"messages":[{"role":"user","content":"another"}],"stream":false'),
        lambda raw: raw.replace(b'},{"role":"user","content":"question 4"', b'},,{"role":"user","content":"question 4"'),
        lambda raw: raw.replace(b'"answer 4"}]', b'"answer 4"},]'),
        lambda raw: raw.replace(b'"answer 4"}]', b'"answer 4"}'),
        lambda raw: raw.replace(b'"answer 4"}]', b'"answer 4"}],"messages":[{"role":"user","content":"x"}]'),
        lambda raw: raw[:-1],
        lambda raw: raw + b"}",
        lambda raw: raw.replace(b"answer 4", b"answer \\ud800"),
        lambda raw: raw.replace(b"answer 4", b"answer \xff"),
        lambda raw: raw.replace(b"word", b"w\\u006frd", 1),
        lambda raw: raw.replace(b"system", b"user", 1),
    ],
)
def test_odd_bodies_are_parsed_whole(model, change):
    memo = BodyMemo(10**7)
    remember(memo, "t", conversation_of(4), model)
    assert parsed(memo, "t", change(conversation_of(5))) is None
    assert parsed(memo, "t", conversation_of(5)) is not None


@pytest.mark.parametrize(
    "head",
    [b'{"metadata":{"messages":[1]},', b'{"tools":[],', b'{"a\\"":1,', b'{"user":"' + b"y" * 5000 + b'",'],
)
def test_heads_that_are_not_plain_are_not_remembered(model, head):
    memo = BodyMemo(10**7)
    raw = conversation_of(3).replace(b'{"model":"m",', head)
    remember(memo, "t", raw, model)
    assert memo.bytes == 0


def test_what_names_messages_twice_is_what_json_says_it_is(model):
    memo = BodyMemo(10**7)
    raw = conversation_of(3).replace(b'"stream":false', b'"messages":[{"role":"user","content":"the last counts"}]')
    assert [message["content"] for message in remember(memo, "t", raw, model).turn.messages] == ["the last counts"]
    assert memo.bytes == 0


@pytest.mark.parametrize(("new", "said"), [({"role": "nobody"}, "'nobody' is not a role"), (5, "expected object")])
def test_an_error_names_the_message_by_its_place_in_the_whole(model, new, said):
    memo = BodyMemo(10**7)
    remember(memo, "t", conversation_of(3), model)
    raw = orjson.loads(conversation_of(4))
    raw["messages"][8] = new
    for fields in ({}, {"user": "now another"}):
        body, seen = parsed(memo, "t", orjson.dumps({**raw, **fields}))
        with pytest.raises(TurnError) as caught:
            turn_of(model, body, seen)
        assert caught.value.message.startswith("messages[8]")
        assert said in caught.value.message


def test_what_is_said_of_a_message_is_said_every_time(model):
    memo = BodyMemo(10**7)
    history = [{"role": "user", "content": [{"type": "odd"}, {"type": "text", "text": LONG}]}]
    for _ in range(3):
        seen = remember(memo, "t", orjson.dumps({"messages": history, "odd": 1}), model)
        assert seen.warnings == ["ignored unknown fields: odd", "skipped messages[0].content[0]: unknown content type 'odd'"]
        history = [*history, {"role": "user", "content": "more"}]


def test_memory_is_bounded_and_the_least_recent_go(model):
    memo = BodyMemo(200_000)
    bodies = [conversation_of(3).replace(b"question 0", b"subject %d" % number) for number in range(100)]
    for raw in bodies:
        remember(memo, "t", raw, model)
        assert 0 < memo.bytes <= 200_000
    assert parsed(memo, "t", bodies[0]) is None
    assert parsed(memo, "t", bodies[-1]) is not None
    assert memo.bytes == sum(entry.nbytes for bucket in memo._entries.values() for entry in bucket.values())
    wide = BodyMemo(10**9)
    remember(wide, "t", conversation_of(3).replace(b"question 0", "é".encode()), model)
    assert wide.bytes > 4 * len(LONG)
    off = BodyMemo(0)
    remember(off, "t", bodies[0], model)
    assert parsed(off, "t", bodies[0]) is None
    # Many that begin alike for long: each lookup compares no more than a few.
    alike = BodyMemo(10**9)
    for raw in bodies:
        remember(alike, "t", raw, model)
    assert sum(map(len, alike._entries.values())) == body_memo._MAX_ALIKE


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=40))
def test_books_balance(model, plan):
    memo = BodyMemo(90_000)
    for subject, turns in plan:
        remember(memo, "t", conversation_of(turns).replace(b"question 0", b"subject %d" % subject), model)
        held = [entry for bucket in memo._entries.values() for entry in bucket.values()]
        assert memo.bytes == sum(entry.nbytes for entry in held) <= 90_000
        assert all(memo._entries.values())


def test_what_only_one_of_two_parsers_can_read_is_not_remembered(model):
    """A thousand levels: what reads the whole body takes them, what looks for the messages' end does not."""
    head = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}]})[:-1]
    raw = head + b', "metadata": {"deep": ' + b"[" * 1000 + b"]" * 1000 + b"}}"
    memo = BodyMemo(10**7)
    remember(memo, "t", raw, model)
    assert memo.bytes == 0
    assert parsed(memo, "t", raw) is None


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(1, 12), st.sampled_from([-1, -1, 2, 7])), min_size=1, max_size=6),
    last=st.integers(0, 5),
    turns=st.integers(1, 14),
    cuts=st.lists(st.integers(1, 12_000), max_size=20),
)
def test_following_finds_what_looking_at_the_whole_finds(model, plan, last, turns, cuts):
    """The longest of what a body begins with, however it is cut on its way."""
    memo, kept = BodyMemo(10**7), set()
    # The longer ones first: a shorter one stays beside a longer one, and gives way to one that goes on from it.
    bodies = [
        conversation_of(length * 40).replace(b"answer %d" % edit, b"changed") for length, edit in sorted(plan, reverse=True)
    ]
    for raw in bodies:
        remember(memo, "t", raw, model)
        kept.add(raw[: raw.rindex(b"]")])
    raw = bodies[last % len(bodies)] if turns > 12 else conversation_of(turns * 40)
    following, at = Following(memo, "t"), 0
    for length in (*cuts, len(raw)):
        following.feed(raw[at : at + length])
        at += length
    expected = max((len(one) for one in kept if raw.startswith(one)), default=None)
    assert (None if following.place is None else following.place.entry.end) == expected
    assert following.pieces.whole() == raw
    if following.place is not None:
        hasher = following.place.hasher.copy()
        hasher.update(raw[expected:])
        assert hasher.digest() == xxh3_128_digest(raw)


class Counted(bytes):
    """Tells what is made of it in Python: slices."""

    sliced = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        Counted.sliced += len(got) if isinstance(at, slice) else 0
        return got


def test_of_a_known_conversation_only_the_new_part_is_copied(model, monkeypatch):
    """A body of half a megabyte is hashed as it comes; it is never put together, and its pieces are not kept."""
    memo = BodyMemo(10**8)
    history = [{"role": "user", "content": f"{number} {LONG}"} for number in range(50)]
    remember(memo, "t", orjson.dumps({"model": "m", "messages": history}), model)
    raw = orjson.dumps({"model": "m", "messages": [*history, {"role": "user", "content": "new"}]})
    following = Following(memo, "t")
    for at in range(0, len(raw), 65536):
        following.feed(Counted(raw[at : at + 65536]))
    monkeypatch.setattr(BodyPieces, "whole", None)
    Counted.sliced = 0
    body, seen = memo.parse(following)
    turn, _, _ = turn_of(model, body, seen)
    memo.keep(seen, body, turn.messages, turn.message_digests)
    assert turn.messages[-1]["content"] == "new"
    assert len(raw) > 500_000
    assert seen.raw == b""
    assert 0 < Counted.sliced < 200
    assert len(seen.behind) < 200


@given(pieces=st.lists(st.binary(max_size=9), max_size=400), cuts=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900))))
def test_pieces_of_a_body_are_the_body(pieces, cuts):
    body, whole = BodyPieces(), b"".join(pieces)
    for piece in pieces:
        body.add(piece)
    assert body.size == len(whole)
    assert len(body._pieces) <= 256
    for again in range(2):
        assert [body.part(start, end) for start, end in cuts] == [whole[start:end] for start, end in cuts], again
        assert body.whole() == whole


HEADS = [
    (b'{"messages":[', True),
    (b' {"model": "a \\" b\\\\", "stream":true,\n"max_tokens" : 1.5e3, "x":null , "messages" : [', True),
    (b'{"tools":[],"messages":[', False),
    (b'{"a":{"messages":[', False),
    (b'{"a":"\\","messages":[', False),
    (b'{"a":"b" "messages":[', False),
]
SHOW = "import re, sys; p = re.compile(bytes.fromhex(sys.argv[1]), re.DOTALL); "
SHOW += "print(*[int(p.match(bytes.fromhex(head)) is not None) for head in sys.argv[2:]])"


@pytest.mark.parametrize("python", [sys.executable, "/usr/bin/python3"])
def test_heads_are_known_to_every_python_at_hand(python):
    """Debian 12's 3.11.2 matches some possessive groups wrongly; then no body is ever remembered, and nothing says so."""
    if shutil.which(python) is None:
        pytest.skip(f"there is no {python}")
    arguments = [pattern.hex() for pattern in (body_memo._PLAIN_HEAD.pattern, *(head for head, _ in HEADS))]
    done = subprocess.run([python, "-c", SHOW, *arguments], capture_output=True, text=True, timeout=60)
    if "multiple repeat" in done.stderr:
        pytest.skip(f"{python} is older than 3.11")
    assert done.stdout.split() == [str(int(plain)) for _, plain in HEADS], done.stderr
