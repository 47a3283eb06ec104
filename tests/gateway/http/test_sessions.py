"""Sessions over HTTP: the next turn has the generated ids, whoever sends it sees only their own, and histories branch."""

import asyncio
import dataclasses

import orjson
import pytest
from gateway_harness import run_gateway

from gateway.turn import TurnError
from prefix_cache.hashing import unpack_tokens

S = {"X-Session-ID": "s1"}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


async def get(gateway, path, *, status=200, method="GET", **kwargs):
    async with gateway.http.request(method, gateway.url + path, **kwargs) as response:
        body = orjson.loads(await response.read())
        assert response.status == status, body
        return body


def prompt(gateway, position=-1):
    return unpack_tokens(gateway.dispatcher.requests[position]["prompt"].packed_token_ids).tolist()


def metric(gateway, name):
    for line in gateway.telemetry.render_metrics().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [S, {}], ids=["named", "by prefix"])
async def test_the_next_turn_goes_on_where_the_last_one_ended(gateway, headers, stream):
    gateway.dispatcher.script.text = "Hello there "
    body = {"model": "tiny", "messages": [user("hi")]}
    await (gateway.events if stream else gateway.json)("/v1/chat/completions", body, headers=headers)
    first = prompt(gateway)
    # The client trims what it got; the prompt keeps what was generated.
    await gateway.chat(messages=[user("hi"), said("Hello there"), user("more")], headers=headers)
    text = gateway.dispatcher.prompt_text()
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello there <|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(gateway)[: len(first)] == first
    listed = await get(gateway, "/v1/sessions")
    (session,) = listed["data"]
    assert session["named"] is bool(headers)
    assert session["turns"] == 2
    assert session["tokens"]["spliced"] == len("Hello there ")
    assert session["tokens"]["prompt"] == len(first) + len(prompt(gateway))
    assert session["tokens"]["cached"] == 6


async def test_a_session_shows_its_branches_and_where_they_are(gateway):
    await gateway.chat(headers=S)
    shown = await get(gateway, "/v1/sessions/s1")
    (branch,) = shown["branches"]
    assert branch["messages"] == 1
    assert branch["tokens"] == len(prompt(gateway))
    assert branch["replica"] == "replica-0"
    assert branch["residency"] == {"replica-0": {"blocks": branch["blocks"], "tokens": branch["blocks"] * 16}}
    assert shown["cost"] == {"prefill_seconds": 0.1, "decode_seconds": 0.1}
    assert shown["source"] == "x-session-id"
    assert shown["hit_rate"] == pytest.approx(3 / branch["tokens"])


async def test_another_key_sees_nothing(tiny_model):
    async with run_gateway(tiny_model, api_keys=("a", "b")) as gateway:
        a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")
        gateway.dispatcher.script.text = "Hello there "
        await gateway.chat(headers={**S, **a})
        assert (await get(gateway, "/v1/sessions/s1", headers=a))["turns"] == 1
        for path, method in (("/v1/sessions/s1", "GET"), ("/v1/sessions/s1", "DELETE"), ("/v1/sessions/s1/fork", "POST")):
            error = await get(gateway, path, method=method, headers=b, status=404)
            assert error["error"]["code"] == "session_not_found"
        assert (await get(gateway, "/v1/sessions", headers=b))["data"] == []
        # The same id, and the same history: what was generated for A is not spliced for B.
        await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers={**S, **b})
        assert "Hello there<|im_end|>" in gateway.dispatcher.prompt_text()
        await get(gateway, "/v1/sessions", status=401)


async def test_an_edited_history_is_a_branch_and_its_old_blocks_are_superseded(gateway):
    long = "a long question " * 4
    await gateway.chat(messages=[user("one"), said("two"), user(long)], headers=S)
    old = gateway.dispatcher.requests[-1]["prompt"].digests
    await gateway.chat(messages=[user("one"), said("two"), user("another question")], headers=S)
    new = gateway.dispatcher.requests[-1]["prompt"].digests
    ((model, orphaned),) = gateway.dispatcher.superseded
    assert model == "tiny"
    shared = sum(left == right for left, right in zip(old, new, strict=False))
    assert 0 < shared < len(old)
    # The old prompt's own blocks, and those that its answer filled.
    assert orphaned.startswith(b"".join(list(old)[shared:]))
    shown = await get(gateway, "/v1/sessions/s1")
    assert [branch["messages"] for branch in shown["branches"]] == [3, 3]
    assert shown["misses"] == 1
    assert shown["superseded_blocks"] == len(orphaned) // 16
    # Back to the first one: branches live side by side, and no more is reported.
    await gateway.chat(messages=[user("one"), said("two"), user(long), said("Hello there"), user("x")], headers=S)
    await gateway.chat(messages=[user("one"), said("two"), user("yet another")], headers=S)
    assert len(gateway.dispatcher.superseded) == 1


async def test_a_sub_agent_starts_from_its_parents_prefix(gateway):
    messages = [{"role": "system", "content": "You are an agent. " * 5}, user("go")]
    gateway.dispatcher.script.text = "Going "
    await gateway.chat(messages=messages, headers=S)
    child = {"X-Session-ID": "child", "X-Parent-Session-ID": "s1"}
    await gateway.chat(messages=[*messages, said("Going"), user("look into this")], headers=child)
    assert "Going <|im_end|>" in gateway.dispatcher.prompt_text()
    shown = await get(gateway, "/v1/sessions/child")
    assert shown["parent"] == "s1"
    assert shown["tokens"]["spliced"] == 6
    # What both share is nobody's to give up.
    await get(gateway, "/v1/sessions/child", method="DELETE")
    own = b"".join(joined for _, joined in gateway.dispatcher.superseded)
    assert not set(gateway.dispatcher.requests[0]["prompt"].digests) & {own[at : at + 16] for at in range(0, len(own), 16)}
    assert len(own) > 0


async def test_a_session_is_forked_and_deleted(gateway):
    gateway.dispatcher.script.text = "Hello there "
    await gateway.chat(headers=S)
    forked = await get(gateway, "/v1/sessions/s1/fork", method="POST", json={"session_id": "s2"}, status=201)
    assert (forked["id"], forked["parent"], forked["turns"]) == ("s2", "s1", 0)
    taken = await get(gateway, "/v1/sessions/s1/fork", method="POST", json={"session_id": "s2"}, status=409)
    assert taken["error"]["code"] == "session_exists"
    unnamed = await get(gateway, "/v1/sessions/s1/fork", method="POST", status=201)
    assert unnamed["id"].startswith("fork-")
    bad = await get(gateway, "/v1/sessions/s1/fork", method="POST", json={"session_id": 3}, status=400)
    assert bad["error"]["param"] == "session_id"
    await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers={"X-Session-ID": "s2"})
    assert "Hello there <|im_end|>" in gateway.dispatcher.prompt_text()
    assert (await get(gateway, "/v1/sessions/s1", method="DELETE"))["deleted"] is True
    await get(gateway, "/v1/sessions/s1", status=404)
    assert (await get(gateway, "/v1/sessions/s2"))["turns"] == 1


async def test_sessions_come_in_pages(gateway):
    for name in ("b", "a/x", "c"):
        await gateway.chat(headers={"X-Session-ID": name})
    first = await get(gateway, "/v1/sessions?limit=2")
    assert [session["id"] for session in first["data"]] == ["a/x", "b"]
    assert first["has_more"]
    second = await get(gateway, "/v1/sessions", params={"limit": 2, "after": first["after"]})
    assert [session["id"] for session in second["data"]] == ["c"]
    assert not second["has_more"]
    assert (await get(gateway, "/v1/sessions/a/x"))["id"] == "a/x"
    for limit in ("0", "x", "1001", "-1"):
        assert (await get(gateway, f"/v1/sessions?limit={limit}", status=400))["error"]["param"] == "limit"


async def test_two_turns_at_once_are_both_served_and_both_remembered(gateway):
    gateway.dispatcher.script.text = "Hello there "
    await gateway.chat(headers=S)
    gate = gateway.dispatcher.script.gate = asyncio.Event()
    base = [user("hi"), said("Hello there")]
    turns = [asyncio.create_task(gateway.chat(messages=[*base, user(f"question {number}")], headers=S)) for number in range(3)]
    await gateway.dispatcher.wait_for(4)
    gate.set()
    await asyncio.gather(*turns)
    shown = await get(gateway, "/v1/sessions/s1")
    assert shown["turns"] == 4
    assert len(shown["branches"]) == 3
    # Each of them can be gone on with.
    for number in range(3):
        await gateway.chat(messages=[*base, user(f"question {number}"), said("Hello there"), user("x")], headers=S)
        assert gateway.dispatcher.prompt_text().count("Hello there <|im_end|>") == 2


async def test_other_tools_begin_anew_where_they_stand(gateway):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    gateway.dispatcher.script.text = "Hello there "
    await gateway.chat(headers=S)
    await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers=S, tools=[tool])
    # The tools are written first, so nothing before them can be kept.
    assert '"name": "f"' in gateway.dispatcher.prompt_text()
    assert (await get(gateway, "/v1/sessions/s1"))["misses"] == 1


async def test_a_turn_that_fails_leaves_the_session_as_it_was(gateway):
    gateway.dispatcher.script.text = "Hello there "
    await gateway.chat(headers=S)
    gateway.dispatcher.script.late_error = RuntimeError("broken")
    await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers=S, status=500)
    gateway.dispatcher.script.late_error = None
    await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers=S)
    assert "Hello there <|im_end|>" in gateway.dispatcher.prompt_text()


async def test_a_stop_string_is_not_spliced(gateway):
    gateway.dispatcher.script.text = "Hello there END and more"
    await gateway.chat(headers=S, stop=["END"])
    await gateway.chat(messages=[user("hi"), said("Hello there "), user("x")], headers=S)
    assert "END" not in gateway.dispatcher.prompt_text()


async def test_without_a_ledger_there_are_no_sessions(tiny_model):
    async with run_gateway(tiny_model, ledger=False) as gateway:
        gateway.dispatcher.script.text = "Hello there "
        await gateway.chat(headers=S)
        await gateway.chat(messages=[user("hi"), said("Hello there"), user("x")], headers=S)
        assert "Hello there<|im_end|>" in gateway.dispatcher.prompt_text()
        assert (await get(gateway, "/v1/sessions", status=404))["error"]["code"] == "ledger_off"


async def test_sessions_are_bounded_by_bytes(tiny_model):
    async with run_gateway(tiny_model, max_bytes=40_000) as gateway:
        for number in range(40):
            await gateway.chat(headers={"X-Session-ID": f"s{number}"})
        assert metric(gateway, "turnkeep_gateway_sessions_bytes") <= 40_000
        assert metric(gateway, "turnkeep_gateway_sessions") < 40
        assert metric(gateway, "turnkeep_gateway_sessions_evicted_total") > 0
        kept = {session["id"] for session in (await get(gateway, "/v1/sessions"))["data"]}
        assert "s39" in kept
        assert "s0" not in kept


async def test_a_call_that_max_tokens_cut_is_not_spliced(gateway):
    gateway.dispatcher.script.text = generated = '<tool_call>\n{"name": "f", "arguments": {"q": "cats"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for number, cut in enumerate((generated.index("cats"), generated.index("tool_call>", 20))):
        headers = {"X-Session-ID": f"cut-{number}"}
        answer = await gateway.chat(headers=headers, tools=[tool], max_tokens=cut)
        assert answer["choices"][0]["finish_reason"] == "length"
        back = answer["choices"][0]["message"]
        assert back["tool_calls"][0]["function"]["name"] == "f"
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "none"}
        await gateway.chat(messages=[user("hi"), back, result], headers=headers, tools=[tool])
        assert generated[:cut] + "<|im_end|>" not in gateway.dispatcher.prompt_text()
        assert metric(gateway, 'turnkeep_gateway_history_fallbacks_total{reason="answer_cut"}') == number + 1


@pytest.mark.parametrize("known", [True, False], ids=["a later turn", "the first turns"])
async def test_a_session_deleted_during_a_turn_stays_deleted(gateway, known):
    gateway.dispatcher.script.text = "Hello there "
    if known:
        await gateway.chat(headers=S)
    gate = asyncio.Event()
    gateway.dispatcher.script = dataclasses.replace(gateway.dispatcher.script, gate=gate)
    turn = asyncio.create_task(gateway.events("/v1/chat/completions", {"model": "tiny", "messages": [user("a")]}, headers=S))
    await gateway.dispatcher.wait_for(2 if known else 1)
    gateway.dispatcher.script = dataclasses.replace(gateway.dispatcher.script, gate=None)
    if not known:
        await gateway.chat(headers=S)
    assert (await get(gateway, "/v1/sessions/s1", method="DELETE"))["deleted"] is True
    gate.set()
    await turn
    await get(gateway, "/v1/sessions/s1", status=404)
    assert (await get(gateway, "/v1/sessions"))["data"] == []
    # The name may be used again, and forked onto.
    await gateway.chat(headers=S)
    assert (await get(gateway, "/v1/sessions/s1"))["turns"] == 1
    assert (await get(gateway, "/v1/sessions/s1/fork", method="POST", json={"session_id": "s2"}, status=201))["id"] == "s2"
    await get(gateway, "/v1/sessions/s2", method="DELETE")
    assert (await get(gateway, "/v1/sessions/s1/fork", method="POST", json={"session_id": "s2"}, status=201))["id"] == "s2"


async def test_a_parent_is_what_was_declared_and_no_stranger_that_begins_alike(gateway):
    messages = [{"role": "system", "content": "You are an agent. " * 5}, user("go")]
    await gateway.chat(messages=messages, headers={"X-Session-ID": "first"})
    for name, declared, parent in (("second", None, None), ("self", "self", None), ("third", "elsewhere", "elsewhere")):
        headers = {"X-Session-ID": name, **({"X-Parent-Session-ID": declared} if declared else {})}
        await gateway.chat(messages=[*messages, said("Hello there"), user(name)], headers=headers)
        shown = await get(gateway, f"/v1/sessions/{name}")
        assert shown["parent"] == parent
        assert shown["tokens"]["spliced"] == len("Hello there")  # they share all the same


class Refusing:
    """Something that a worker waits for before it starts, and that refuses the request meanwhile."""

    async def wait(self):
        raise TurnError(400, "unsupported_grammar", "no grammars")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["on dispatch", "in its queue", "later"])
async def test_a_turn_that_its_worker_refuses_is_no_turn(gateway, stream, where):
    refusal = TurnError(400, "unsupported_grammar", "no grammars")
    refusing = {"on dispatch": {"error": refusal}, "in its queue": {"gate": Refusing()}, "later": {"late_error": refusal}}[
        where
    ]
    script = gateway.dispatcher.script
    gateway.dispatcher.script = dataclasses.replace(script, **refusing)
    body = {"model": "tiny", "messages": [user("hi")], "stream": stream}

    async def refused():
        async with gateway.post("/v1/chat/completions", body, headers=S) as response:
            assert b"unsupported_grammar" in await response.read()
            assert response.status == (200 if stream and where == "later" else 400)

    await refused()
    assert (await get(gateway, "/v1/sessions/s1", status=404))["error"]["code"] == "session_not_found"
    gateway.dispatcher.script = script
    await gateway.chat(headers=S)
    before = await get(gateway, "/v1/sessions/s1")
    gateway.dispatcher.script = dataclasses.replace(script, **refusing)
    await refused()
    after = await get(gateway, "/v1/sessions/s1")
    assert after["turns"] == before["turns"] == 1
    assert after["tokens"] == before["tokens"]


async def test_a_session_that_was_recognised_is_told_and_recorded_under_one_name(gateway):
    gateway.dispatcher.script.text = "Hello there "
    messages, told = [user("hi")], []
    for question in ("more", "and more", "still more"):
        body = {"model": "tiny", "messages": messages}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body) as response:
            usage = orjson.loads(await response.read())["usage"]["turnkeep"]
            told.append(response.headers["X-Turnkeep-Session"])
        assert told[-1] == f"{usage['session']}; source=prefix"
        messages = [*messages, said("Hello there"), user(question)]
    (name,) = {header.partition(";")[0] for header in told}
    assert name.startswith("auto-")
    assert (await get(gateway, f"/v1/sessions/{name}"))["turns"] == 3
    assert [record.session.key for record in gateway.observer.records] == [name] * 3


async def test_turns_that_reuse_all_they_could_are_no_misses(gateway):
    gateway.dispatcher.script.text = "Hello there "
    long = user("x" * 200)
    await gateway.chat(messages=[long], headers=S)
    # Cut short and going on elsewhere: the end of it is gone, and nobody computes it again.
    await gateway.chat(messages=[long, said("Hello there"), user("a")], headers=S)
    await gateway.chat(messages=[long, said("Hello there"), user("b")], headers=S)
    misses = (await get(gateway, "/v1/sessions/s1/misses"))["data"]
    assert (await get(gateway, "/v1/sessions/s1"))["misses"] == len(misses)


@pytest.mark.parametrize(
    "name",
    [".", "..", "a/../b", "//", "%2F", "x/misses", "misses", "fork", "pin", "a?b#c&d=e", "é 日本", "x" * 10_240, "a\x00\nb"],
)
async def test_a_session_of_any_name_is_reached_by_a_query(gateway, name):
    """Clients tidy paths before they send them: `.` and `..` never arrive."""
    await gateway.chat(messages=[user("hi")], session_id=name)
    (session,) = (await get(gateway, "/v1/sessions"))["data"]
    query = {"params": {"id": session["id"]}}
    assert (await get(gateway, "/v1/sessions", **query))["branches"][0]["messages"] == 1
    assert (await get(gateway, "/v1/sessions/misses", **query))["session"] == session["id"]
    await get(gateway, "/v1/sessions/pin", method="POST", status=202, **query)
    forked = await get(gateway, "/v1/sessions/fork", method="POST", json={"session_id": "copy"}, status=201, **query)
    assert forked["parent"] == session["id"]
    assert (await get(gateway, "/v1/sessions", method="DELETE", **query))["deleted"] is True
    assert [each["id"] for each in (await get(gateway, "/v1/sessions"))["data"]] == ["copy"]


async def test_a_session_may_be_called_as_an_endpoint_is(gateway):
    await gateway.chat(messages=[user("hi")], session_id="misses")
    assert (await get(gateway, "/v1/sessions/misses"))["id"] == "misses"
    assert (await get(gateway, "/v1/sessions/misses/misses"))["session"] == "misses"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "?id="), ("DELETE", ""), ("DELETE", "?id="), ("POST", "/fork"), ("POST", "/pin?id=")]
)
async def test_a_request_that_names_no_session_says_how_to(gateway, method, path):
    answer = await get(gateway, "/v1/sessions" + path, method=method, status=400)
    assert answer["error"]["message"] == "id: name a session, as /v1/sessions/ID or with ?id=ID."


async def test_a_worker_knows_a_session_without_a_name_by_the_name_that_the_gateway_gave_it(gateway):
    """Else it would not know whom a hint about its return, or a pin, is about."""
    async with gateway.post("/v1/chat/completions", {"model": "tiny", "messages": [user("hi")]}) as response:
        name = response.headers["X-Turnkeep-Session"].split(";")[0]
    assert name.startswith("auto-")
    sent = gateway.dispatcher.requests[-1]
    assert (sent["session"].key, sent["known_as"]) == (None, name)
    assert [hint.session for _, hint in gateway.dispatcher.retained] == [name]
    await gateway.chat(messages=[user("hi")], headers=S)
    assert gateway.dispatcher.requests[-1]["known_as"] == "s1"


@pytest.mark.parametrize("path", ["/s1?id=s2", "/fork?id=s2", "?id=s1&id=s2"])
async def test_a_request_that_names_two_sessions_deletes_neither(gateway, path):
    for name in ("s1", "s2"):
        await gateway.chat(messages=[user("hi")], session_id=name)
    answer = await get(gateway, "/v1/sessions" + path, method="DELETE", status=400)
    assert answer["error"]["message"] == "id: name one session, in the path or with ?id=ID, not two."
    assert [each["id"] for each in (await get(gateway, "/v1/sessions"))["data"]] == ["s1", "s2"]
