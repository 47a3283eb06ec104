import asyncio

import pytest

from gateway.admission.buckets import Buckets
from gateway.admission.limits import RateLimits
from gateway.admission.shared_buckets import SharedBuckets
from gateway.auth import Caller
from gateway.turn import TurnError
from sessions.redis_link import RedisConfig, RedisLink
from tests.redis_server import redis_server

CALLER = Caller("tenant", "key", requests_per_minute=20, tokens_per_minute=1000)


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


@pytest.fixture
async def links(server):
    links = [RedisLink(RedisConfig(server.url, budget=5, retry_interval=0.05)) for _ in range(2)]
    await links[0].client.flushall()
    yield links
    for link in links:
        await link.aclose()


def limits(link):
    local = Buckets()
    return RateLimits(local, SharedBuckets(link, local)), local


async def admitted(gateways, count):
    """How many of so many requests at once the gateways let in together."""

    async def one(number):
        try:
            await gateways[number % len(gateways)].request(CALLER)
        except TurnError:
            return False
        return True

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


async def test_two_gateways_count_together(links):
    gateways = [limits(link)[0] for link in links]
    # One more may come back while the requests are made.
    assert await admitted(gateways, 60) in (20, 21)
    assert sum(link.calls["limit", "ok"] for link in links) == 60


async def test_what_was_not_used_comes_back_everywhere(links):
    (one, _), (other, local) = map(limits, links)
    charge, _ = await one.tokens(CALLER, 1000)
    with pytest.raises(TurnError):
        await other.tokens(CALLER, 500)
    await charge.settle(100)
    charge, headers = await other.tokens(CALLER, 500)
    assert 400 <= int(headers["x-ratelimit-remaining-tokens"]) <= 420
    assert local.level("tokens:key", 1000) == pytest.approx(400, abs=20)


async def test_each_goes_on_from_what_it_saw_while_redis_is_gone(links, server):
    gateways = [limits(link)[0] for link in links]
    assert await admitted(gateways, 20) == 20
    server.kill()
    try:
        # Both know the bucket as they saw it last: as good as empty.
        assert await admitted(gateways, 40) <= 4
        assert await gateways[0].request(Caller("t", "another", requests_per_minute=5))
    finally:
        server.start()
    while not all(link.up for link in links):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    # A Redis that was emptied knows of nothing.
    assert await admitted(gateways, 40) >= 20


async def test_a_key_of_another_type_makes_way(links):
    gateway, _ = limits(links[0])
    await links[0].client.set("turnkeep:limit:1:requests:key", b"x")
    headers = await gateway.request(CALLER)
    assert headers["x-ratelimit-remaining-requests"] == "19"
    ttl = await links[0].client.pttl("turnkeep:limit:1:requests:key")
    assert 60_000 < ttl <= 130_000
