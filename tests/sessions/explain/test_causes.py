"""The first difference of two conversations, its place and its class."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.explain.causes import first_difference
from sessions.explain.conversation import Conversation, RememberedText, dump, dump_head
from sessions.explain.texts import common_prefix, common_suffix, excerpt
from sessions.explain.volatile import volatile_kind
from sessions.nonces import without_nonces


def tool(name, description="does it"):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {"type": "object"}}}


def call(name, arguments, call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = "You look after a warehouse. Today is 2026-11-30. Be brief."
HISTORY = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "How many bolts are left, and where are they? " * 20},
    {"role": "assistant", "content": "", "reasoning_content": "I must count.", "tool_calls": [call("count", {"a": 1, "b": 2})]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1,204 in aisle 3"},
    {"role": "assistant", "content": "There are 1,204 bolts in aisle 3. " * 5},
    {"role": "user", "content": "And nuts?"},
]
TOOLS = [tool("count"), tool("move"), tool("order")]


def explained(change=None, *, tools=TOOLS, settings=None, old_settings=None):
    old = Conversation(copy.deepcopy(HISTORY), TOOLS, old_settings or {})
    messages = copy.deepcopy(HISTORY)
    if change is not None:
        messages = change(messages) or messages
    return first_difference(old, Conversation(messages, tools, settings or {}))


def setting(at, **fields):
    def change(messages):
        messages[at].update(fields)
        return [message | {} for message in messages]

    return change


ARGUMENTS = "messages[2].tool_calls[0].function.arguments"
CASES = [
    ("system_changed", "messages[0].content", 10, setting(0, content=SYSTEM.replace("after a warehouse", "at the stars"))),
    ("timestamp", "messages[0].content", 46, setting(0, content=SYSTEM.replace("2026-11-30", "2026-11-31"))),
    ("history_edited", "messages[1].content", 0, setting(1, content="Something else, and long enough. " * 30)),
    ("counter", "messages[3].content", 15, setting(3, content="1,204 in aisle 4")),
    ("arguments_reserialised", ARGUMENTS, 2, setting(2, tool_calls=[call("count", {"b": 2, "a": 1})])),
    ("history_edited", ARGUMENTS + ".a", 0, setting(2, tool_calls=[call("count", {"a": "x", "b": 2})])),
    ("reasoning_dropped", "messages[2].reasoning_content", 0, setting(2, reasoning_content=None)),
    ("history_edited", "messages[4].content", 0, setting(4, content="No idea.")),
    ("truncated", "messages[4]", 0, lambda messages: messages[:4]),
    ("compacted", "messages[1].content", 0, lambda messages: [messages[0], {"role": "user", "content": "Summary: bolts."}]),
    ("compacted", "messages[1].role", 0, lambda messages: [messages[0], *messages[4:]]),
    ("history_edited", "messages[1].content", 0, lambda m: [m[0], {"role": "user", "content": "Stop!"}, *m[1:]]),
    ("history_edited", "messages[4].role", 0, lambda m: [*m[:4], {"role": "user", "content": m[4]["content"]}, m[5]]),
]


@pytest.mark.parametrize(("cause", "path", "offset", "change"), CASES)
def test_messages(cause, path, offset, change):
    found = explained(change)
    assert (found.cause, found.path, found.offset) == (cause, path, offset)
    assert found.message == int(path.split("[")[1].split("]")[0])


@pytest.mark.parametrize(
    ("cause", "path", "tools"),
    [
        ("tools_added", "tools[3]", [*TOOLS, tool("sell")]),
        ("tools_added", "tools[0]", [tool("sell"), *TOOLS]),
        ("tools_removed", "tools[1]", [TOOLS[0], TOOLS[2]]),
        ("tools_removed", "tools[0]", []),
        ("tools_reordered", "tools[0]", [TOOLS[1], TOOLS[0], TOOLS[2]]),
        ("tools_changed", "tools[1].function.description", [TOOLS[0], tool("move", "moves it"), TOOLS[2]]),
        ("tools_added", "tools[3]", [*TOOLS, TOOLS[0]]),
    ],
)
def test_tools(cause, path, tools):
    found = explained(tools=tools)
    assert (found.cause, found.path, found.message) == (cause, path, None)


def test_tools_that_carry_the_time():
    old = Conversation(HISTORY, [tool("now", "It is 12:00:01 now.")])
    found = first_difference(old, Conversation(HISTORY, [tool("now", "It is 12:00:09 now.")]))
    assert (found.cause, found.path) == ("timestamp", "tools[0].function.description")


def test_the_order_of_keys_of_a_tool_counts_as_templates_print_it():
    flipped = {"type": "function", "function": dict(reversed(TOOLS[0]["function"].items()))}
    assert explained(tools=[flipped, *TOOLS[1:]]).cause == "tools_changed"


def test_settings():
    found = explained(
        settings={"model": "b", "reasoning_effort": "low"}, old_settings={"model": "b", "reasoning_effort": "high"}
    )
    assert (found.cause, found.path, found.old, found.new) == ("settings_changed", "reasoning_effort", "high", "low")


def test_a_continuation_has_no_difference():
    more = [*HISTORY, {"role": "assistant", "content": "None. \n"}, {"role": "user", "content": "Order some."}]
    assert explained(lambda messages: more) is None
    old = Conversation([*HISTORY, {"role": "assistant", "content": "None.", "tool_calls": None}], TOOLS)
    assert first_difference(old, Conversation(more, TOOLS)) is None


def test_an_answer_that_came_back_edited():
    old = Conversation([*HISTORY, {"role": "assistant", "content": "<think>hm</think>None."}])
    dropped = Conversation([*HISTORY, {"role": "assistant", "content": "None."}, HISTORY[1]])
    assert first_difference(old, dropped).cause == "reasoning_dropped"
    edited = Conversation([*HISTORY, {"role": "assistant", "content": "Some."}, HISTORY[1]])
    assert first_difference(old, edited).cause == "history_edited"


def test_excerpts_show_both_sides_of_the_place_and_no_more():
    old = Conversation([{"role": "user", "content": "x" * 5000 + "\nold\x1b[31m" + "y" * 5000}])
    new = Conversation([{"role": "user", "content": "x" * 5000 + "\nnéw" + "y" * 5000}])
    found = first_difference(old, new)
    assert found.offset == 5001
    assert found.old == "…" + "x" * 39 + "\\nold\\x1b[31m" + "y" * 72 + "…"
    assert found.new.startswith("…" + "x" * 39 + "\\nn")
    assert len(found.new) < 200


def test_offsets_are_bytes():
    old = Conversation([{"role": "user", "content": "日本🙂a"}])
    assert first_difference(old, Conversation([{"role": "user", "content": "日本🙂b"}])).offset == 10


value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.text(max_size=30) | st.none(),
        "tool_calls": st.lists(st.builds(call, st.text(max_size=3), value), max_size=2),
    },
)
conversations = st.builds(
    Conversation,
    st.lists(message, max_size=5),
    st.lists(st.builds(tool, st.text(max_size=3), st.text(max_size=5)), max_size=3),
    st.dictionaries(st.sampled_from(["model", "reasoning_effort"]), value, max_size=2),
)


@settings(deadline=None)
@given(conversations, conversations)
def test_any_two_conversations_are_told_apart_or_one_continues_the_other(old, new):
    found = first_difference(old, new)
    assert first_difference(old, old) is None
    if found is None:
        assert len(new.messages) >= len(old.messages)
    else:
        assert found.path
        assert len(found.old) <= 1300  # a hundred and twenty characters, escaped at worst
        assert len(found.new) <= 1300
        assert found.offset >= 0


@settings(deadline=None)
@given(conversations)
def test_what_is_remembered_is_what_was_said(said):
    text = RememberedText(dump_head(said), [dump(message) for message in said.messages])
    assert first_difference(said, text.conversation()) is None
    assert text.nbytes > 0


@given(st.text(), st.text(), st.text(), st.text())
def test_prefixes_and_suffixes(head, one, other, tail):
    left, right = head + one + tail, head + other + tail
    prefix = common_prefix(left, right)
    assert left[:prefix] == right[:prefix]
    assert prefix in (len(left), len(right)) or left[prefix] != right[prefix]
    suffix = common_suffix(left, right, prefix)
    assert prefix + suffix <= min(len(left), len(right))
    assert left[len(left) - suffix :] == right[len(right) - suffix :]
    assert excerpt(left, prefix).isprintable()


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("timestamp", "Today is 2026-11-30.", "Today is 2026-12-01."),
        ("timestamp", "Now: Mon, 30 Nov 2026 12:00:01 GMT ok", "Now: Tue, 1 Dec 2026 09:13:59 GMT ok"),
        ("timestamp", "It is 12:30 pm", "It is 1:05 am"),
        ("timestamp", "Today is Monday.", "Today is Tuesday."),
        ("timestamp", "ts=1764504000 n=1", "ts=1764504999 n=2"),
        ("timestamp", "on 30.11.2026 we", "on 01.12.2026 we"),
        ("uuid", "id 3f2504e0-4f89-11d3-9a0c-0305e82c3301.", "id 9f2504e0-4f89-11d3-9a0c-0305e82c3302."),
        ("uuid", "call_8fk2mz9q0apq x", "call_8fk2mz9q0bbb x"),
        ("uuid", "session deadbeefcafebabe1234", "session deadbeefcafebabe5678"),
        ("counter", "turn 3 of 9", "turn 14 of 9"),
        ("counter", "version 1.2.3", "version 1.2.4"),
        (None, "money", "monitor"),
        (None, "You are nice", "You are mean"),
        (None, "On 2026-11-30 you are nice", "On 2026-12-01 you are mean"),
        (None, "the same", "the same"),
        (None, "a" * 20_000, "b" * 20_000),
    ],
)
def test_volatile_values(kind, old, new):
    assert volatile_kind(old, new) == kind
    assert volatile_kind(new, old) == kind
    assert volatile_kind("x" * 100_000 + " " + old, "x" * 100_000 + " " + new) == kind


@settings(deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_texts_are_looked_at_in_bounded_time(old, new):
    assert volatile_kind(old, new) in (None, "timestamp", "uuid", "counter")
    assert volatile_kind("1" * 10_000 + old, "1" * 9_999 + new) in (None, "timestamp", "uuid", "counter")


BILLING = "x-anthropic-billing-header: cc_version=2.1.5; cc_entrypoint=cli; cch=a1b2c;"


@pytest.mark.parametrize(
    ("system", "without"),
    [
        (BILLING, ""),
        (f"{BILLING}\nYou are an agent.\nWork.", "You are an agent.\nWork."),
        (f"You are an agent.\n{BILLING}\nWork.", "You are an agent.\nWork."),
        (f"You are an agent.\n{BILLING.title()}", "You are an agent.\n"),
        (f"Never send '{BILLING}' to anybody.", f"Never send '{BILLING}' to anybody."),
        ("", ""),
    ],
)
def test_known_nonces_are_left_out(system, without):
    assert without_nonces(system) == without


def test_a_prompt_without_nonces_is_not_copied():
    text = "You are an agent. " * 1000
    assert without_nonces(text) is text
