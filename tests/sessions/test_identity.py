import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from sessions.identity import (
    DEFAULT_ORDER,
    GROUPING_SOURCES,
    MAX_KEY_LENGTH,
    SOURCES,
    bounded_key,
    check_order,
    identify,
    tenant_of,
)

UUID = "0b54cf41-6c14-4b8e-9d61-6f2b1d8f3a77"


def who(headers=None, body=None, **kwargs):
    return identify(CIMultiDict(headers or {}), body or {}, **kwargs)


@pytest.mark.parametrize(
    ("headers", "body", "key", "source"),
    [
        ({"Session-ID": "a"}, {}, "a", "session-id"),
        ({"X-Session-ID": "a"}, {}, "a", "x-session-id"),
        ({"x-claude-code-session-id": "a"}, {}, "a", "x-claude-code-session-id"),
        ({"session_id": "a"}, {}, "a", "session_id"),
        ({"thread-id": "t"}, {}, "t", "thread-id"),
        ({"x-session-affinity": "a"}, {}, "a", "x-session-affinity"),
        ({"X-Dynamo-Session-ID": "a"}, {}, "a", "x-dynamo-session-id"),
        ({"X-SMG-Routing-Key": "a"}, {}, "a", "x-smg-routing-key"),
        ({"x-litellm-session-id": "a"}, {}, "a", "x-litellm-session-id"),
        ({"Correlation-ID": "a"}, {}, "a", "correlation-id"),
        ({"X-Correlation-ID": "a"}, {}, "a", "x-correlation-id"),
        ({}, {"session_id": "a"}, "a", "body.session_id"),
        ({}, {"session_id": 17}, "17", "body.session_id"),
        ({}, {"vllm_xargs": {"session_id": "a"}}, "a", "body.vllm_xargs.session_id"),
        ({}, {"prompt_cache_key": "a"}, "a", "body.prompt_cache_key"),
        ({}, {"metadata": {"session_id": "a"}}, "a", "body.metadata.session_id"),
        ({}, {"metadata": {"user_id": f"user_9f_account_{UUID}_session_{UUID}"}}, UUID, "body.metadata.user_id"),
        ({}, {"metadata": {"user_id": f'{{"device_id":"d","session_id":"{UUID}"}}'}}, UUID, "body.metadata.user_id"),
        ({}, {"agent_hint": {"session_id": "a"}}, "a", "body.agent_hint.session_id"),
    ],
)
def test_every_source_alone(headers, body, key, source):
    found = who(headers, body)
    assert (found.key, found.source) == (key, source)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Request-ID": "r1", "traceparent": "00-1-1-01"}, {}),
        ({"Session-ID": "  "}, {"session_id": ""}),
        ({}, {"metadata": {"user_id": "alice"}, "user": "alice", "previous_response_id": "resp_1"}),
        ({}, {"metadata": {"user_id": '{"session_id": 5}'}}),
        ({}, {"metadata": {"user_id": "{broken"}}),
        ({}, {"metadata": "text", "vllm_xargs": [1], "agent_hint": None, "session_id": True, "prompt_cache_key": {"a": 1}}),
        ({}, {"session_id": 1.5}),
        ({}, {"session_id": 10**5000}),
    ],
)
def test_what_names_no_session(headers, body):
    found = who(headers, body)
    assert found.key is None
    assert found.source is None


def test_the_order_is_by_specificity_and_headers_come_before_the_body():
    headers = {"Session-ID": "first", "X-Session-ID": "second", "Correlation-ID": "job"}
    body = {"session_id": "third"}
    assert who(headers, body).key == "first"
    del headers["Session-ID"]
    assert who(headers, body).key == "second"
    del headers["X-Session-ID"]
    found = who(headers, body)
    assert (found.key, found.correlation) == ("third", "job")
    assert who(headers, {}).key == "job"


def test_the_order_can_be_set():
    headers = {"Session-ID": "a", "X-Session-ID": "b"}
    assert who(headers, order=("x-session-id",)).key == "b"
    assert who(headers, order=()).key is None
    with pytest.raises(KeyError):
        who(headers, order=("no-such-source",))
    assert set(DEFAULT_ORDER) == set(SOURCES)


def test_sub_agents_have_a_session_of_their_own_and_name_their_parent():
    main = who({"x-claude-code-session-id": "s"})
    child = who({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"})
    grandchild = who({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"})
    assert (main.key, main.parent) == ("s", None)
    assert (child.key, child.parent) == ("s/a1", main.key)
    assert (grandchild.key, grandchild.parent) == ("s/a2", child.key)


def test_codex_threads():
    main = who({"session-id": "s", "thread-id": "s"})
    child = who({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"})
    assert (main.key, main.parent) == ("s", None)
    assert (child.key, child.parent) == ("s/t", "s")
    older = who({"session_id": "s", "thread-id": "t"})
    assert older.key == "s/t"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-session-affinity": "c", "x-parent-session-id": "p"}, {}),
        ({"session-id": "c", "x-parent-session-id": "p"}, {}),
        ({"x-dynamo-session-id": "c", "x-dynamo-parent-session-id": "p"}, {}),
        ({}, {"agent_hint": {"session_id": "c", "parent_session_id": "p"}}),
    ],
)
def test_parents(headers, body):
    found = who(headers, body)
    assert (found.key, found.parent) == ("c", "p")


def test_a_session_is_not_its_own_parent():
    assert who({"x-session-affinity": "c", "x-parent-session-id": "c"}).parent is None


def test_sources_that_disagree_are_reported_in_order_and_change_nothing():
    found = who({"X-Session-Affinity": "b", "Session-ID": "a", "Correlation-ID": "job"}, {"session_id": "c"})
    assert (found.key, found.source) == ("a", "session-id")
    assert found.conflicts == ("x-session-affinity", "body.session_id")
    assert who({"Session-ID": "a", "X-Session-ID": "a"}, {"prompt_cache_key": "app"}).conflicts == ()
    assert {"correlation-id", "body.prompt_cache_key"} < GROUPING_SOURCES <= set(SOURCES)


def test_the_parts_of_a_joined_name_agree_with_it():
    headers = {"session-id": "s", "thread-id": "t", "x-session-affinity": "s"}
    found = who(headers, {"metadata": {"session_id": "t"}})
    assert (found.key, found.conflicts) == ("s/t", ())
    claude = {"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a"}
    assert who(claude, {"metadata": {"user_id": f"user_1_account_2_session_{UUID}"}}).conflicts == ()


@pytest.mark.parametrize("name", ["Session-Final", "X-Session-Final", "X-Dynamo-Session-Final"])
@pytest.mark.parametrize(("value", "final"), [("true", True), ("1", True), ("YES", True), ("false", False), ("", False)])
def test_the_last_turn_of_a_session(name, value, final):
    assert who({"Session-ID": "a", name: value}).final is final
    assert who({name: value}).final is False  # nothing is named that could end


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        *[(90, 90.0), (1.5, 1.5), ("5m", 300.0), ("1h", 3600.0), ("30", 30.0), ("30 d", None), (0, None), (-1, None)],
        *[(True, None), (None, None), ([], None), ("1e9", None), (10**400, None), (float("nan"), None), ("9" * 5000, None)],
    ],
)
def test_how_long_a_caller_asks_its_prefix_to_be_kept(ttl, seconds):
    assert who({}, {"agent_hint": {"session_id": "a", "cache_control": {"ttl": ttl}}}).ttl == seconds


@pytest.mark.parametrize("hint", [None, [], "x", {"cache_control": "5m"}, {"cache_control": None}])
def test_other_hints_ask_for_nothing(hint):
    assert who({}, {"agent_hint": hint}).ttl is None


def test_an_order_that_cannot_be_used_says_what_to_change():
    with pytest.raises(
        ValueError, match=r"sessions\.sources has no source named 'X-Session-Id'; did you mean 'x-session-id'\?"
    ):
        check_order(("X-Session-Id",))
    with pytest.raises(ValueError, match=r"no source named '\?'; known are: session-id, "):
        check_order(("?",))
    with pytest.raises(ValueError, match="names 'session-id' twice; remove one"):
        check_order(("session-id", "thread-id", "session-id"))
    check_order(DEFAULT_ORDER)


def test_similar_names_stay_apart():
    names = ["session-1", "session-12", "Session-1", "session-1/a", "session-1%2Fa"]
    assert len({who({"Session-ID": name}).key for name in names}) == len(names)
    assert who({"x-claude-code-session-id": "a/b", "x-claude-code-agent-id": "c"}).key == "a%2Fb/c"


def test_tenants_are_digests_of_the_key():
    assert tenant_of(None) == tenant_of("") == ""
    assert tenant_of("sk-1") != tenant_of("sk-2")
    assert len(tenant_of("sk-1")) == 16
    assert "sk-1" not in tenant_of("sk-1")
    assert who({"Session-ID": "a"}, tenant="t").tenant == "t"
    assert tenant_of("\udce9") != ""


def test_long_and_unprintable_names_are_digested():
    long = "x" * 10_000
    assert who({"Session-ID": long}).key == "sha256:" + hashlib.sha256(long.encode()).hexdigest()
    assert bounded_key("x" * MAX_KEY_LENGTH) == "x" * MAX_KEY_LENGTH
    assert bounded_key("a\nb").startswith("sha256:")
    assert bounded_key("\ud800").startswith("sha256:")


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(["session_id", "metadata", "user_id", "vllm_xargs", "agent_hint", "prompt_cache_key"])


@given(
    headers=st.dictionaries(st.sampled_from([name for name in SOURCES if not name.startswith("body")]), st.text(), max_size=4),
    body=st.dictionaries(known, json | st.dictionaries(known, json, max_size=3), max_size=4),
)
def test_any_input_gives_a_bounded_printable_key(headers, body):
    found = who(headers, body)
    assert (found.key is None) == (found.source is None)
    for value in (found.key, found.parent, found.correlation):
        assert value is None or (0 < len(value) <= MAX_KEY_LENGTH and value.isprintable())
    assert found == who(headers, body)
