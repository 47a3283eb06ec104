"""Hints of gateways when a session will be back: recorded by the replica, shown, bounded, gone when it is back."""

import asyncio

import msgspec
import pytest
from replica_harness import running, simulated

from engine.server.retention import MAX_SHOWN, WaitingTable
from gateway.workers.protocol import MAX_RETENTION_HINTS, GenerateRequest, RetainRequest, RetentionHint, WaitingSessions
from gateway.workers.replica import ReplicaClient
from gateway.workers.retention import RetentionHints

PROMPT = {"token_ids": [1, 2, 3], "sampling": {"max_tokens": 2}}


async def waiting(replica):
    status, answer = await replica.get("/v1/retain")
    assert status == 200
    return msgspec.json.decode(answer, type=WaitingSessions)


def hint(session, **fields):
    return RetentionHint(session=session, request_id="r", **fields)


async def test_a_session_waits_until_it_is_back_or_closed():
    async with running(simulated) as replica:
        sent = hint("s", tenant="t", tools=("build",), return_p50=60.0, return_p90=90.5, weight=12.0, ttl=300.0)
        body = msgspec.json.encode(RetainRequest((sent, hint("other", tenant="t"))))
        assert await replica.post("/v1/retain", body) == (200, b'{"waiting":2}')
        shown = await waiting(replica)
        assert [entry.hint for entry in shown.sessions] == [sent, hint("other", tenant="t")]
        assert all(0 <= entry.waited < 5 for entry in shown.sessions)
        # Another tenant's session of that name is another session.
        await replica.generate({**PROMPT, "request_id": "a", "session": "s", "tenant": "u"})
        assert len((await waiting(replica)).sessions) == 2
        await replica.generate({**PROMPT, "request_id": "b", "session": "s", "tenant": "t"})
        assert [entry.hint.session for entry in (await waiting(replica)).sessions] == ["other"]
        closed = RetainRequest((hint("other", tenant="t", state="closed"),))
        await replica.post("/v1/retain", msgspec.json.encode(closed))
        shown = await waiting(replica)
        assert (shown.sessions, shown.hints_total) == ((), 3)
        text = (await replica.get("/metrics"))[1].decode()
        assert "turnkeep_engine_waiting_sessions 0.0" in text
        assert "turnkeep_engine_retention_hints_total 3.0" in text


async def test_the_client_of_the_gateway_speaks_it():
    async with running(simulated) as replica:
        client = ReplicaClient(replica.url)
        try:
            info = await client.info()
            assert info.capabilities.retention_hints
            assert await client.retain([hint("s", return_p50=1.0)]) == 1
            stream = await client.generate(GenerateRequest(request_id="x", token_ids=[1], session="s"), {})
            async for _ in stream:
                pass
            assert (await waiting(replica)).sessions == ()
        finally:
            await client.aclose()


async def test_hints_are_gathered_and_what_cannot_be_delivered_is_dropped():
    async with running(simulated) as replica:
        client = ReplicaClient(replica.url)
        hints = RetentionHints({"there": client}.get, gather=0.01)
        try:
            for number in range(20):
                hints.add("there", hint(f"s{number}"))
                hints.add("gone", hint("s"))
            async with asyncio.timeout(5):
                while (await waiting(replica)).hints_total < 20:  # noqa: ASYNC110 - nothing tells a test of it
                    await asyncio.sleep(0.01)
            for _ in range(2 * MAX_RETENTION_HINTS):
                hints.add("there", hint("same"))
            async with asyncio.timeout(5):
                while (await waiting(replica)).hints_total < 20 + MAX_RETENTION_HINTS:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert (await waiting(replica)).hints_total == 20 + MAX_RETENTION_HINTS
        finally:
            await hints.aclose()
            await client.aclose()
        hints.add("there", hint("late"))
        await asyncio.sleep(0.05)  # its client is closed; nobody notices
        await hints.aclose()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"hints": [{"session": "s"}]}, "hints[0].request_id"),
        ({"hints": [{"session": "s", "request_id": "r", "state": "gone"}]}, "hints[0].state"),
        ({"hints": [{"session": "s", "request_id": "r"}] * (MAX_RETENTION_HINTS + 1)}, "hints"),
        ({}, "hints"),
    ],
)
async def test_bad_hints_are_refused_by_name(body, field):
    async with running(simulated) as replica:
        status, answer = await replica.post("/v1/retain", body)
        error = msgspec.json.decode(answer)["error"]
        assert (status, error["code"]) == (400, "invalid_request")
        assert field in (error.get("field") or error["message"])


def test_the_table_is_bounded():
    now = [0.0]
    table = WaitingTable(2000, clock=lambda: now[0])
    for number in range(5000):
        now[0] = number
        table.told(hint(f"s{number}"))
    assert len(table) == 2000
    shown = table.shown()
    assert len(shown.sessions) == MAX_SHOWN
    assert (shown.sessions[0].hint.session, shown.sessions[0].waited) == ("s3000", 1999.0)
    table.returned("", None)
    table.returned("", "s3000")
    assert len(table) == 1999
