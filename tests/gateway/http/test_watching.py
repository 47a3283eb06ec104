"""Why a turn missed, how long a session is away, and what its worker is told: over HTTP, in front of a scripted worker."""

import asyncio

import orjson
import pytest
from fake_dispatcher import ALL, FakeGeneration, Script
from gateway_harness import run_gateway

from gateway.turn import Receipt
from gateway.watching.config import MissesConfig
from sessions.codec import decode_record, encode_record

CHAT = "/v1/chat/completions"
SYSTEM = "You look after a warehouse. Today is {}. Be brief, and say what you do not know."
SESSION = {"Session-ID": "s1"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
    for name in ("count", "build")
]


class Agent:
    """Sends its whole history on every turn, as agents do."""

    def __init__(self, gateway, headers=SESSION):
        self.gateway = gateway
        self.headers = dict(headers)
        gateway.dispatcher.remembers = True
        self.messages = [{"role": "system", "content": SYSTEM.format("2026-11-30")}]
        self.answered = None

    async def say(self, text, *, cached=ALL, answer="Fine.", worker="replica-0", instance="", status=200, **fields):
        self.gateway.dispatcher.script = Script(answer, cached=cached)
        self.gateway.dispatcher.worker = worker
        self.gateway.dispatcher.instance = instance
        self.messages.append({"role": "user", "content": text})
        async with self.gateway.post(CHAT, {"messages": self.messages, **fields}, headers=self.headers) as response:
            body = await response.json()
            assert response.status == status, body
            self.answered = response.headers
        message = body["choices"][0]["message"]
        self.messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None})
        return self.answered.get("X-Turnkeep-Miss")

    async def misses(self, session="s1", status=200):
        url = f"{self.gateway.url}/v1/sessions/{session}/misses"
        async with self.gateway.http.get(url, headers=self.headers) as response:
            body = await response.json()
            assert response.status == status, body
            return body


@pytest.fixture(autouse=True)
def chosen_worker(monkeypatch):
    """The worker that the test says."""
    created = FakeGeneration.__init__

    def init(self, dispatcher, script, request):
        where = getattr(dispatcher, "worker", "replica-0"), "prefix", 0, 1, getattr(dispatcher, "instance", "")
        created(self, dispatcher, script, request, Receipt(*where))

    monkeypatch.setattr(FakeGeneration, "__init__", init)


def metric(gateway, name, **labels):
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    line = f"turnkeep_gateway_{name}{{{text}}} "
    found = [row for row in gateway.telemetry.render_metrics().decode().splitlines() if row.startswith(line)]
    return float(found[0].removeprefix(line)) if found else 0.0


async def test_a_session_that_goes_on_misses_nothing(gateway):
    agent = Agent(gateway)
    for text in ("one", "two", "three"):
        assert await agent.say(text) is None
    assert await agent.misses() == {"object": "list", "session": "s1", "data": [], "advice": []}


async def test_a_time_at_the_top_of_the_prompt(gateway):
    agent = Agent(gateway)
    await agent.say("one")
    for day in ("2026-12-01", "2026-12-02"):
        before = gateway.dispatcher.prompt_tokens()
        agent.messages[0]["content"] = SYSTEM.format(day)
        header = await agent.say("again")
        cause, path, tokens = header.split("; ")[:3]
        assert (cause, path) == ("timestamp", "path=messages[0].content")
        # One token a byte here, and one a special token: all from the digit that changed on, the answer among it.
        shared = 1 + len("system\n") + SYSTEM.index("{}") + (6 if day == "2026-12-01" else 9)
        assert int(tokens.removeprefix("tokens=")) == before + len("Fine.") - shared
    found = await agent.misses()
    assert [miss["cause"] for miss in found["data"]] == ["timestamp", "timestamp"]
    latest = found["data"][0]
    assert latest["before"].startswith("…ok after a warehouse. Today is 2026-12-01. Be brief")
    assert latest["after"].startswith("…ok after a warehouse. Today is 2026-12-02. Be brief")
    assert latest["field_bytes"] == SYSTEM.index("{}") + 9
    assert latest["tokens"] == 1 + len("system\n") + latest["field_bytes"]
    assert latest["text_bytes"] == len("<|im_start|>system\n") + latest["field_bytes"]
    assert (latest["message"], latest["worker"], latest["previous_worker"]) == (0, "replica-0", "replica-0")
    assert latest["lost_seconds"] > 0
    [advice] = found["advice"]
    assert (advice["cause"], advice["times"]) == ("timestamp", 2)
    assert "a time at messages[0].content" in advice["text"]
    assert metric(gateway, "misses_total", cause="timestamp") == 2
    assert metric(gateway, "missed_tokens_total", cause="timestamp") == sum(miss["lost_tokens"] for miss in found["data"])


@pytest.mark.parametrize(
    ("cause", "path", "change"),
    [
        ("history_edited", "messages[1].content", lambda m: m[1].update(content="something else entirely, and long")),
        ("counter", "messages[1].content", lambda m: m[1].update(content="take 2: how many bolts are left over?")),
        ("system_changed", "messages[0].content", lambda m: m[0].update(content="You are somebody else now. " * 3)),
    ],
)
async def test_histories_that_change(gateway, cause, path, change):
    agent = Agent(gateway)
    await agent.say("take 1: how many bolts are left over?")
    await agent.say("and nuts, of which there should be many more?")
    change(agent.messages)
    header = await agent.say("well?")
    assert header.split("; ")[:2] == [cause, f"path={path}"]


async def test_what_nobody_computes_again_is_not_lost(gateway):
    """The end of a conversation that is dropped, and a branch that the worker still has."""
    agent = Agent(gateway)
    await agent.say("one")
    await agent.say("two, at some length, so that there is something to lose here")
    whole = list(agent.messages)
    del agent.messages[2:]  # [system, one], as it was sent first
    agent.messages.pop()
    assert await agent.say("one") is None
    assert metric(gateway, "missed_tokens_total", cause="truncated") == 0
    del agent.messages[1:]
    assert (await agent.say("one", cached=16)).startswith("evicted; tokens=")  # shorter, and not there any more
    agent.messages[:] = whole
    agent.messages[1] = {"role": "user", "content": "another one, which the worker has not seen yet"}
    header = await agent.say("three")
    prompt = gateway.dispatcher.prompt_tokens()
    lost = int(header.split("; ")[2].removeprefix("tokens="))
    assert 0 < lost <= prompt - gateway.dispatcher.generations[-1].cached
    agent.messages[:] = whole
    assert await agent.say("four") is None  # the history is another than the last turn's, and all there
    assert metric(gateway, "misses_total", cause="history_edited") == 1
    assert [miss["cause"] for miss in (await agent.misses())["data"]] == ["history_edited", "evicted"]
    assert metric(gateway, "missed_tokens_total", cause="history_edited") == lost


async def test_tools_that_are_added_and_a_stream_that_says_so(gateway):
    agent = Agent(gateway)
    await agent.say("one", tools=TOOLS[:1])
    agent.messages.append({"role": "user", "content": "two"})
    async with gateway.post(CHAT, {"messages": agent.messages, "tools": TOOLS, "stream": True}, headers=SESSION) as response:
        await response.read()
        assert response.headers["X-Turnkeep-Miss"].startswith("tools_added; path=tools[1]; tokens=")


async def test_blocks_that_were_evicted_and_blocks_that_are_elsewhere(gateway):
    agent = Agent(gateway)
    await agent.say("one")
    expected = (gateway.dispatcher.prompt_tokens() + len("Fine.")) // 16 * 16
    assert (await agent.say("two", cached=16)).startswith(f"evicted; tokens={expected - 16}; seconds=")
    assert (await agent.say("three", cached=0, worker="replica-1")).startswith("other_replica; tokens=")
    assert await agent.say("four", cached=ALL, worker="replica-0") is None  # elsewhere, and there all the same
    elsewhere, evicted = (await agent.misses())["data"]
    assert (elsewhere["worker"], elsewhere["previous_worker"]) == ("replica-1", "replica-0")
    assert (evicted["cause"], evicted["lost_tokens"], evicted["tokens"]) == ("evicted", expected - 16, 16)
    assert "path" not in evicted


async def test_of_two_reasons_the_one_that_cost_more_is_told(gateway):
    """The last message changed, which is little; and the turn went to a replica that has nothing of what is before it."""
    agent = Agent(gateway)
    await agent.say("one")
    await agent.say("a")
    left = gateway.dispatcher.prompt_tokens()
    agent.messages[-2:] = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "I see. " * 3}]
    cause, tokens = (await agent.say("more", cached=0, worker="replica-1")).split("; ")[:2]
    assert cause == "other_replica"
    assert left // 2 < int(tokens.removeprefix("tokens=")) <= left
    (miss,) = (await agent.misses())["data"]
    assert (miss["worker"], miss["previous_worker"], "tokens" in miss) == ("replica-1", "replica-0", False)
    agent.messages[-2:] = [{"role": "user", "content": "b" * 40}, {"role": "assistant", "content": "Oh. " * 3}]
    assert (await agent.say("more", worker="replica-1")).startswith("history_edited; path=messages[5]")


async def test_names_of_workers_are_their_gateway_s_and_say_nothing_to_another(gateway):
    """Each of two gateways with replicas of its own has a replica-0; and one that both use may have two names."""
    agent = Agent(gateway)
    await agent.say("one", instance="a0")
    [record] = (await gateway.pipeline.keeper.store.page("", after=None, limit=1)).records
    assert (record.branches[0].worker, record.branches[0].worker_instance) == ("replica-0", "a0")
    assert decode_record(encode_record(record)).branches[0].worker_instance == "a0"  # as it crosses to another gateway
    assert (await agent.say("two", cached=0, instance="b0")).startswith("other_replica; tokens=")
    assert (await agent.say("three", cached=0, instance="b0", worker="worker-7")).startswith("evicted; tokens=")


async def test_a_replica_that_is_lost_in_the_middle_of_a_turn(gateway):
    """The next turn goes elsewhere, and is told what it lost: what the last answered turn left."""
    agent = Agent(gateway)
    await agent.say("one, at some length, so that there is something to lose", instance="a0")
    left = gateway.dispatcher.prompt_tokens()
    agent.messages.append({"role": "user", "content": "two"})
    gateway.dispatcher.script = Script(late_error=RuntimeError("killed"))
    await gateway.json(CHAT, {"messages": agent.messages}, headers=SESSION, status=500)
    agent.messages.pop()
    header = await agent.say("two", cached=16, worker="replica-1", instance="a1")
    assert header.split("; ")[:2] == ["other_replica", f"tokens={left // 16 * 16 - 16}"]
    [miss] = (await agent.misses())["data"]
    assert (miss["worker"], miss["previous_worker"]) == ("replica-1", "replica-0")
    # One that failed in the middle of an edited history left only what both share.
    agent.messages[1] = {"role": "user", "content": "another beginning, of the same length as it was before"}
    await gateway.json(CHAT, {"messages": [*agent.messages, {"role": "user", "content": "x"}]}, headers=SESSION)
    gateway.dispatcher.script = Script(late_error=RuntimeError("killed"))
    edited = [agent.messages[0], {"role": "user", "content": "something else, and of a good length too, for all to see"}]
    await gateway.json(CHAT, {"messages": edited}, headers=SESSION, status=500)
    shared = len("system\n") + 2 + len(agent.messages[0]["content"]) + len("\nuser\n")
    agent.messages[:] = edited[:1]
    assert await agent.say(edited[1]["content"], cached=shared // 16 * 16 - 16) is None


async def test_no_text_is_shown_where_excerpts_are_off(tiny_model):
    async with run_gateway(tiny_model, misses=MissesConfig(excerpts=False)) as gateway:
        agent = Agent(gateway)
        await agent.say("one")
        agent.messages[0]["content"] = SYSTEM.format("2026-12-01")
        assert (await agent.say("two")).startswith("timestamp; path=messages[0].content")
        [miss] = (await agent.misses())["data"]
        assert "warehouse" not in str(miss)
        assert miss["field_bytes"] > 0


async def test_nothing_is_explained_where_that_is_off(tiny_model):
    async with run_gateway(tiny_model, misses=MissesConfig(explain=False)) as gateway:
        agent = Agent(gateway)
        await agent.say("one")
        agent.messages[0]["content"] = SYSTEM.format("2026-12-01")
        assert await agent.say("two", cached=0) is None
        assert (await agent.misses())["data"] == []
        assert gateway.pipeline.watch.misses.log.nbytes == 0


async def test_misses_of_a_session_that_is_not_there(gateway, tiny_model):
    assert (await Agent(gateway).misses("never/was", status=404))["error"]["code"] == "session_not_found"
    async with run_gateway(tiny_model, ledger=False) as without:
        agent = Agent(without)
        await agent.say("one")
        assert (await agent.misses(status=404))["error"]["code"] == "ledger_off"


async def test_where_the_text_is_not_known_any_more_the_place_still_is(tiny_model):
    async with run_gateway(tiny_model, misses=MissesConfig(max_bytes=1)) as gateway:
        agent = Agent(gateway)
        await agent.say("one")
        await agent.say("two")
        agent.messages[1]["content"] = "edited, and longer than it was before"
        assert (await agent.say("three")).startswith("history_edited; path=messages[1]; tokens=")


async def test_text_of_a_turn_that_is_not_the_last_one_is_not_compared(gateway):
    """As when another gateway has served the session since."""
    agent = Agent(gateway)
    await agent.say("one")
    log = gateway.pipeline.watch.misses.log
    [session] = log._sessions.values()
    earlier = list(session.text.messages)
    await agent.say("two")
    session.text.messages[:] = earlier
    agent.messages[3]["content"] = "edited, and longer than it was before"
    assert (await agent.say("three")).startswith("history_edited; path=messages[3]; tokens=")
    assert "before" not in (await agent.misses())["data"][0]


async def test_another_tenant_sees_no_misses_and_no_gaps(gateway):
    agent = Agent(gateway, {**SESSION, "Authorization": "Bearer A"})
    await agent.say("one")
    await agent.say("two", cached=0)
    assert len((await agent.misses())["data"]) == 1
    agent.headers["Authorization"] = "Bearer B"
    assert (await agent.misses(status=404))["error"]["code"] == "session_not_found"
    for key, count in (("A", 1), ("B", 0)):
        async with gateway.http.get(gateway.url + "/v1/tools/gaps", headers={"Authorization": f"Bearer {key}"}) as response:
            assert len((await response.json())["data"]) == count


async def test_a_billing_header_that_changes_with_every_request_is_left_out(gateway):
    agent = Agent(gateway)
    for cch in ("a1b2c", "d3e4f", "00000"):
        agent.messages[0]["content"] = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};"},
            {"type": "text", "text": "You are an agent."},
        ]
        assert await agent.say("go on") is None
        assert "billing header" in agent.answered["X-Turnkeep-Warning"]
        assert "cch" not in gateway.dispatcher.prompt_text()
        assert "<|im_start|>system\nYou are an agent.<|im_end|>" in gateway.dispatcher.prompt_text()


CALL = '<tool_call>\n{"name": "build", "arguments": {"q": "x"}}\n</tool_call>'


async def test_tool_gaps_are_learned_shown_and_sent_to_the_worker(gateway):
    now = [1000.0]
    gaps = gateway.pipeline.watch.gaps
    gaps.model._clock = gaps._waiting._clock = gaps._waiting._wall_clock = gaps._wall_clock = lambda: now[0]
    gateway.pipeline.keeper._clock = lambda: now[0]
    agent = Agent(gateway)
    for gap in (30.0, 60.0, 60.0, 90.0):
        await agent.say("go on", answer=CALL, tools=TOOLS, tool_choice="auto")
        now[0] += gap
    await agent.say("enough", tools=TOOLS)
    now[0] += 600
    await agent.say("still there?", tools=TOOLS)
    async with gateway.http.get(gateway.url + "/v1/tools/gaps") as response:
        build, nothing = (await response.json())["data"]
    assert (build["tool"], build["observed"]) == ("build", 4)
    assert (build["p50"], build["p90"]) == (pytest.approx(60, rel=0.05), pytest.approx(90, rel=0.05))
    assert (nothing["tool"], nothing["p50"]) == (None, pytest.approx(600, rel=0.05))
    async with gateway.http.get(gateway.url + "/v1/tools/gaps?tool=build") as response:
        assert [row["tool"] for row in (await response.json())["data"]] == ["build"]
    async with gateway.http.get(gateway.url + "/v1/tools/gaps?tool=none%20such") as response:
        assert response.status == 404
    hints = [hint for _, hint in gateway.dispatcher.retained]
    assert [hint.tools for hint in hints] == [("build",)] * 4 + [()] * 2
    assert {(hint.session, hint.tenant, hint.state) for hint in hints} == {("s1", "", "waiting")}
    assert hints[0].return_p50 is None
    assert (hints[3].return_p50, hints[3].return_p90) == (pytest.approx(60, rel=0.05), pytest.approx(60, rel=0.05))
    assert hints[3].weight == pytest.approx(3, rel=0.02)
    assert [worker for worker, _ in gateway.dispatcher.retained] == ["replica-0"] * 6


async def test_the_caller_s_wish_goes_with_the_hint(gateway):
    await Agent(gateway).say("hi", agent_hint={"cache_control": {"ttl": "5m"}})
    [(_, hint)] = gateway.dispatcher.retained
    assert hint.ttl == 300.0


async def test_the_last_turn_of_a_session_closes_it(gateway):
    agent = Agent(gateway)
    await agent.say("one")
    await agent.say("two", cached=0)
    assert await gateway.pipeline.keeper.store.get("", "s1") is not None
    agent.headers["Session-Final"] = "true"
    await agent.say("bye")
    assert await gateway.pipeline.keeper.store.get("", "s1") is None
    assert (await agent.misses(status=404))["error"]["code"] == "session_not_found"
    assert gateway.dispatcher.retained[-1][1].state == "closed"
    del agent.headers["Session-Final"]
    assert await agent.say("back?", cached=0) is None  # a new session of the old name


async def test_a_turn_that_failed_is_the_end_of_no_gap(gateway):
    agent = Agent(gateway)
    gateway.dispatcher.script = Script(late_error=RuntimeError("boom"))
    await gateway.json(CHAT, {"messages": [*agent.messages, {"role": "user", "content": "x"}]}, headers=SESSION, status=500)
    await agent.say("again")
    assert len(gateway.dispatcher.retained) == 1
    async with gateway.http.get(gateway.url + "/v1/tools/gaps") as response:
        assert (await response.json())["data"] == []


async def test_what_was_never_computed_was_not_evicted(gateway):
    """A turn whose client left, or that failed, left no blocks behind to be missed."""
    agent = Agent(gateway)
    await agent.say("one")
    answered = gateway.dispatcher.prompt_tokens() // 16 * 16
    gateway.dispatcher.script = Script(late_error=RuntimeError("boom"))
    failing = [*agent.messages, {"role": "user", "content": "a long question " * 20}]
    await gateway.json(CHAT, {"messages": failing}, headers=SESSION, status=500)
    agent.messages = failing[:-1]
    assert await agent.say(failing[-1]["content"], cached=answered) is None
    assert (await agent.say("and now", cached=64)).startswith("evicted; ")


async def test_a_watch_that_fails_fails_no_turn(gateway, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("boom")

    for name in ("began", "ended"):
        monkeypatch.setattr(gateway.pipeline.watch.gaps, name, broken)
    agent = Agent(gateway)
    await agent.say("one")
    await agent.say("two")
    assert "could not be watched" in caplog.text


@pytest.mark.parametrize("name", [bytes(range(0x21, 0x100)) * 50, b"x" * 10_240, b"\xff" * 10_240, b"a" * 20_000], ids=len)
async def test_session_ids_of_any_bytes_and_length_are_ids(gateway, name):
    """Two turns of it belong together, and what is kept of the name is short."""
    name = name.replace(b"\x7f", b"")
    host, port = gateway.url.removeprefix("http://").split(":")
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        gateway.dispatcher.script = Script("Fine.", cached=ALL)
        data = orjson.dumps({"messages": messages})
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nSession-ID: " + name
        writer.write(head + b"\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer[:200]
        assert b"X-Turnkeep-Session: sha256:" in answer
        messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "more"}]
    page = await gateway.pipeline.keeper.store.page("", after=None, limit=10)
    [record] = page.records
    assert (record.turns, len(record.key)) == (2, len("sha256:") + 64)


async def test_a_million_sessions_are_watched_in_bounded_memory(gateway):
    """As many as fit are remembered; here a thousand, against bounds made small."""
    watch = gateway.pipeline.watch
    watch.misses.log._max_bytes = 50_000
    watch.gaps._waiting._max = 50
    watch.gaps.model._config = type(watch.gaps.model._config)(max_tools=20, max_tools_per_tenant=10)
    await asyncio.gather(*(Agent(gateway, {"Session-ID": f"s{n}" * 1000}).say("hi") for n in range(100)))
    assert watch.misses.log.nbytes <= 50_000
    assert len(watch.gaps._waiting) == 50
    assert len(watch.gaps.model) <= 20
