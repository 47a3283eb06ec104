"""Tool gaps of several gateways in a real redis-server."""

import asyncio
import random

import pytest
import redis as sync_redis

from sessions.gaps.histogram import RELATIVE_ERROR
from sessions.gaps.model import GapConfig, ToolGapModel
from sessions.gaps.shared import SharedGaps
from sessions.redis_link import RedisConfig, RedisLink
from tests.redis_server import redis_server


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


@pytest.fixture
def client(server):
    if server.process.poll() is not None:
        server.start()
    with sync_redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
async def gateways(server, client):
    links = []

    def make(half_life=3600.0, **settings):
        link = RedisLink(RedisConfig(server.url, budget=2.0, retry_interval=0.05))
        links.append(link)
        config = GapConfig(half_life=half_life, **settings)
        model = ToolGapModel(config)
        return model, SharedGaps(model, link, config)

    yield make
    for link in links:
        await link.aclose()


def near(seconds):
    return pytest.approx(seconds, rel=RELATIVE_ERROR * 1.001)


async def test_what_one_gateway_saw_the_others_know(gateways):
    (one, share_one), (two, share_two) = gateways(), gateways()
    for gap in (10, 20, 30, 40, 50):
        one.observe("t", ["build"], gap)
    for _ in range(5):
        two.observe("t", ["build"], 30)
    one.observe("u", ["build"], 1)
    assert await share_one.sync()
    assert await share_two.sync()
    assert await share_one.sync()
    for model in (one, two):
        [row] = model.rows("t", tool="build")
        assert (row.p50, row.p99, row.weight) == (near(30), near(50), pytest.approx(10, rel=1e-3))
        assert model.rows("u")[0].p50 == near(1)
    # Nothing is counted twice, however often they talk.
    for _ in range(3):
        await share_one.sync()
        await share_two.sync()
    assert one.rows("t", tool="build")[0].weight == pytest.approx(10, rel=1e-3)
    # One that starts later knows it at once.
    late, share_late = gateways()
    await share_late.sync()
    assert late.predict("t", ["build"]).p50 == near(30)


async def test_two_gateways_agree_with_one_that_saw_everything(gateways):
    (one, share_one), (two, share_two) = gateways(), gateways()
    alone = ToolGapModel(GapConfig(half_life=3600.0))
    source = random.Random(1)
    for number in range(400):
        tool, gap = f"tool {number % 7}", source.lognormvariate(1, 2)
        alone.observe("t", [tool], gap)
        (one if source.random() < 0.5 else two).observe("t", [tool], gap)
        if number % 100 == 50:
            await share_one.sync()
            await share_two.sync()
    for share in (share_one, share_two, share_one):
        assert await share.sync()
    expected = {row.tool: (row.p50, row.p90, row.p99) for row in alone.rows("t")}
    assert {row.tool: (row.p50, row.p90, row.p99) for row in one.rows("t")} == expected
    assert {row.tool: (row.p50, row.p90, row.p99) for row in two.rows("t")} == expected


async def test_shared_weights_fade(gateways):
    model, share = gateways(half_life=1.0)
    for _ in range(8):
        model.observe("t", ["build"], 5)
    await share.sync()
    assert 6 < model.rows("t", tool="build")[0].weight <= 8
    await asyncio.sleep(2.0)
    other, share_other = gateways(half_life=1.0)
    await share_other.sync()
    assert 1.2 < other.rows("t", tool="build")[0].weight < 2.1
    other.observe("t", ["build"], 80)
    await share_other.sync()
    assert 2.0 < other.rows("t", tool="build")[0].weight < 3.2


async def test_old_histograms_are_scaled_down_in_time(gateways, client):
    model, share = gateways(half_life=1.0)
    model.observe("t", ["build"], 5)
    await share.sync()
    name = "turnkeep:1:g:h:t:build"
    client.hset(name, "l", float(client.hget(name, "l")) - 100)  # as if it had begun a hundred half-lives ago
    model.observe("t", ["build"], 50)
    await share.sync()
    fields = client.hgetall(name)
    assert len(fields) == 2  # the landmark and what is new
    assert model.rows("t", tool="build")[0].p50 == near(50)


async def test_what_was_seen_while_redis_was_gone_is_passed_on_later(gateways, server, client):
    (one, share_one), (two, share_two) = gateways(), gateways()
    server.kill()
    for _ in range(5):
        one.observe("t", ["build"], 30)
        assert not await share_one.sync()
    assert one.predict("t", ["build"]).p50 == near(30)
    server.start()
    async with asyncio.timeout(10):
        while not await share_one.sync() or not await share_two.sync():  # noqa: ASYNC110 - nothing tells a test of it
            await asyncio.sleep(0.02)
    await share_two.sync()
    assert two.rows("t", tool="build")[0].weight == pytest.approx(5, rel=1e-3)


async def test_nonsense_in_redis_is_nobody_s_prediction(gateways, client):
    one, share_one = gateways()
    for _ in range(5):
        one.observe("t", ["build"], 30)
    await share_one.sync()
    name = "turnkeep:1:g:h:t:build"
    client.hset(name, mapping={"x": "1", "999": "5", "-3": "7", "10": "many", "11": "nan", "12": "inf"})
    client.zadd("turnkeep:1:g:index", {b"\xff\xfe": 2e9, b"no colon": 2e9, b"t:" + b"x" * 1000: 2e9})
    two, share_two = gateways()
    assert await share_two.sync()
    assert two.predict("t", ["build"]).p50 == near(30)
    assert [row.tool for row in two.rows("t")] == ["build"]


async def test_it_runs_by_itself_and_ends_with_the_rest_passed_on(gateways):
    (one, share_one), (two, share_two) = gateways(), gateways()
    share_one.start()
    await asyncio.sleep(0)
    for _ in range(4):
        one.observe("t", ["build"], 30)
    await share_one.aclose()
    await share_one.aclose()
    await share_two.sync()
    assert two.rows("t", tool="build")[0].weight == pytest.approx(4, rel=1e-3)


async def test_the_index_is_bounded(gateways, client):
    model, share = gateways(max_tools=20)
    for number in range(100):
        model.observe(f"tenant {number}", ["x"], 1)
        await share.sync()
    assert client.zcard("turnkeep:1:g:index") == 20
