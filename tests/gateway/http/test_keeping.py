"""What a client says of a session's next turn reaches the replica that has it."""

import pytest
from test_sessions import S, get


async def test_pins_releases_and_prefetches_reach_the_replica_of_the_session(gateway):
    await gateway.chat(headers=S)
    gateway.dispatcher.retained.clear()
    pinned = await get(gateway, "/v1/sessions/s1/pin", method="POST", json={"ttl": 12.5}, status=202)
    assert pinned["pinned"] is True
    assert pinned["ttl"] == 12.5
    await get(gateway, "/v1/sessions/s1/pin", method="POST", status=202)
    await get(gateway, "/v1/sessions/s1/release", method="POST", status=202)
    await get(gateway, "/v1/sessions/s1/prefetch", method="POST", status=202)
    (worker,) = pinned["replicas"]
    told = [(name, hint.session, hint.state, hint.ttl) for name, hint in gateway.dispatcher.retained]
    assert told == [
        (worker, "s1", "waiting", 12.5),
        (worker, "s1", "waiting", 300.0),
        (worker, "s1", "released", None),
        (worker, "s1", "prefetch", None),
    ]


@pytest.mark.parametrize("ttl", [0, -1, "60", None, True, 86_401, [1]])
async def test_a_time_that_is_none_is_refused(gateway, ttl):
    await gateway.chat(headers=S)
    gateway.dispatcher.retained.clear()
    answer = await get(gateway, "/v1/sessions/s1/pin", method="POST", json={"ttl": ttl}, status=400)
    assert answer["error"]["param"] == "ttl"
    assert answer["error"]["message"] == "ttl: a number of seconds above 0 and at most 86400 is expected."
    assert gateway.dispatcher.retained == []


@pytest.mark.parametrize("what", ["pin", "release", "prefetch"])
async def test_sessions_that_are_not_there_cannot_be_kept(gateway, what):
    answer = await get(gateway, f"/v1/sessions/nobody/{what}", method="POST", status=404)
    assert answer["error"]["code"] == "session_not_found"
