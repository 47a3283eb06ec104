"""The store in a real redis-server, which is killed, frozen, emptied and filled with nonsense meanwhile."""

import asyncio
import logging
import signal
import time
from collections import Counter

import msgspec
import pytest
import redis as sync_redis

from sessions.digests import message_digests, prefix_names
from sessions.memory_store import MemoryLedgerStore
from sessions.records import SessionRecord
from sessions.redis_link import RedisConfig, RedisLink
from sessions.redis_store import RedisLedgerStore
from tests.redis_server import redis_server
from tests.sessions.ledgers import a_large_ledger, a_ledger, a_record


@pytest.fixture(scope="module")
def shared_server():
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    """Running, empty and thawed, whatever the test before did to it."""
    if shared_server.process.poll() is not None:
        shared_server.start()
    shared_server.signal(signal.SIGCONT)
    with sync_redis.Redis(port=shared_server.port) as client:
        client.flushall()
    return shared_server


@pytest.fixture
async def gateways(server):
    """Makes stores that share the server, each with a copy of its own."""
    made = []

    def make(max_bytes=10**7, **settings):
        # A busy machine must not look like a slow server here.
        config = RedisConfig(server.url, **{"budget": 2.0, "write_budget": 2.0, "retry_interval": 0.05} | settings)
        store = RedisLedgerStore(MemoryLedgerStore(max_bytes), RedisLink(config))
        store.link = store._link
        made.append(store)
        return store

    yield make
    for store in made:
        await store.aclose()


@pytest.fixture
def client(server):
    with sync_redis.Redis(port=server.port) as client:
        yield client


def at(record, **changes):
    return msgspec.structs.replace(record, **changes)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells a test of it
            await asyncio.sleep(0.01)


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


async def test_a_turn_may_land_on_any_gateway(gateways):
    one, two = gateways(), gateways()
    first = a_record("s", a_ledger(["a", "b"]), version=1)
    assert await one.put(at(first, used_at=1.0))
    assert await two.get("t", "s") == at(first, used_at=1.0)
    second = a_record("s", a_ledger(["a", "b", "c"], generated=(1,)), version=2)
    assert await two.put(at(second, used_at=2.0))
    assert await one.get("t", "s") == at(second, used_at=2.0)
    assert await one.get("other tenant", "s") is None
    # What it has is not fetched again.
    reads = one.link.calls["read", "ok"]
    assert await one.get("t", "s") == at(second, used_at=2.0)
    assert one.link.calls["read", "ok"] == reads


async def test_of_two_turns_at_once_one_has_to_read_and_try_again(gateways):
    one, two = gateways(), gateways()
    await one.put(a_record("s", version=1))
    await two.get("t", "s")
    mine = a_record("s", a_ledger(["mine"]), version=2)
    theirs = a_record("s", a_ledger(["theirs"]), version=2)
    results = await asyncio.gather(one.put(at(mine, used_at=1.0)), two.put(at(theirs, used_at=2.0)))
    assert sorted(results) == [False, True]
    loser = one if not results[0] else two
    winning = await loser.get("t", "s")
    assert winning == (at(theirs, used_at=2.0) if loser is one else at(mine, used_at=1.0))
    assert await loser.put(at(mine, version=3, used_at=3.0))
    assert (await one.get("t", "s")) == (await two.get("t", "s")) == at(mine, version=3, used_at=3.0)
    assert loser.events["conflicts"] == 1


async def test_many_writers_lose_nothing(gateways):
    """Each adds one to a counter, a hundred times, on three gateways."""
    stores = [gateways() for _ in range(3)]

    async def add(store, times):
        for _ in range(times):
            while True:
                known = await store.get("t", "s")
                before = known or SessionRecord(tenant="t", key="s", model="m", version=0)
                if await store.put(at(before, version=before.version + 1, turns=before.turns + 1, used_at=time.time())):
                    break

    await asyncio.gather(*(add(store, 34) for store in stores))
    assert {(await store.get("t", "s")).turns for store in stores} == {102}
    assert all(store.link.up for store in stores)


async def test_a_deleted_session_is_gone_everywhere(gateways):
    one, two = gateways(), gateways()
    await one.put(a_record("s", version=5))
    assert await two.get("t", "s")
    assert await one.delete("t", "s")
    assert await two.get("t", "s") is None
    assert await two.get("t", "s") is None
    assert not await two.delete("t", "s")
    assert not await one.delete("t", "never was")
    # Turns that began before the deletion do not undo it, wherever they ran and whatever is kept there.
    for store in (one, two, gateways()):
        assert not await store.put(a_record("s", version=6))
        assert not await store.put(a_record("s", version=1))
        assert await store.get("t", "s") is None
    epoch = two.epoch("t", "s")
    assert epoch == one.epoch("t", "s") != ""
    assert await two.put(a_record("s", version=1, epoch=epoch))  # the name may be used again
    assert (await one.get("t", "s")).version == 1
    assert not await gateways().put(a_record("s", version=2))


async def test_a_copy_of_what_was_deleted_is_not_taken_for_the_newer_one(gateways):
    one, two = gateways(), gateways()
    await one.put(a_record("s", version=5))
    await two.get("t", "s")
    await two.delete("t", "s")
    anew = a_record("s", version=1, epoch=two.epoch("t", "s"))
    assert await two.put(anew)
    # One has not heard of the deletion, and has a higher version.
    assert await one.get("t", "s") == anew
    assert await one.put(at(anew, version=2))
    assert (await two.get("t", "s")).version == 2


async def test_a_conversation_without_a_session_is_recognised_by_its_prefix(gateways):
    one, two = gateways(), gateways()

    def names(*texts):
        return prefix_names(message_digests([{"role": "user", "content": text} for text in texts]), b"c" * 16)

    await two.put(a_record("short", a_ledger(["x"])))
    await one.put(a_record("long", a_ledger(["x", "y"])))
    assert await two.recognise("t", names("x", "y", "z")) == "long"
    assert await two.recognise("t", names("x", "q")) == "short"
    assert await two.recognise("t", names("y")) is None
    assert await two.recognise("u", names("x", "y", "z")) is None
    # The session went on: its old name is not its name any more.
    await one.put(a_record("long", a_ledger(["x", "y", "z"]), version=2))
    assert await gateways().recognise("t", names("x", "y", "other")) == "short"


async def test_pages_show_all_gateways_sessions_in_order(gateways, client):
    one, two = gateways(), gateways()
    for number, store in zip(range(7), [one, two] * 4, strict=False):
        await store.put(a_record(f"s{number}", version=number + 1))
    await one.put(a_record("foreign", tenant="u"))
    keys, after = [], None
    for _ in range(3):
        page = await one.page("t", after=after, limit=3)
        keys.append([record.key for record in page.records])
        after = page.after
    assert keys == [["s0", "s1", "s2"], ["s3", "s4", "s5"], ["s6"]]
    assert after is None
    await two.delete("t", "s3")
    assert [record.key for record in (await one.page("t", after="s2", limit=9)).records] == ["s4", "s5", "s6"]
    assert [record.key for record in (await gateways().page("t", after="s2", limit=9)).records] == ["s4", "s5", "s6"]


async def test_sessions_expire_and_leave_the_listing(gateways, client):
    short = gateways(ttl=0.05)
    for number in range(5):
        await short.put(a_record(f"s{number}"))
    await asyncio.sleep(2.1)  # ends are kept in whole seconds
    long = gateways()
    await long.put(a_record("stays"))
    assert client.keys("turnkeep:1:s:*") == [b"turnkeep:1:s:t:stays"]
    assert client.zrange("turnkeep:1:k:t", 0, -1) == [b"stays"]
    assert client.zcard("turnkeep:1:e:t") == 1


@pytest.mark.parametrize("damage", ["nonsense", "flipped", "older format", "another session's", "no hash", "bad version"])
async def test_entries_that_are_no_sessions_are_dropped_with_one_line(gateways, client, caplog, damage):
    one, two = gateways(), gateways()
    for key in ("a", "b"):
        await one.put(a_record(key, a_ledger(["x"]), version=3))
        name = f"turnkeep:1:s:t:{key}"
        data = client.hget(name, "d")
        if damage == "nonsense":
            client.hset(name, "d", b"\x00" * 50)
        elif damage == "flipped":
            client.hset(name, "d", data[:-1] + bytes([data[-1] ^ 1]))
        elif damage == "older format":
            client.hset(name, "d", data[:3] + b"\x00" + data[4:])
        elif damage == "another session's":
            await one.put(a_record("c", tenant="u"))
            client.hset(name, "d", client.hget("turnkeep:1:s:u:c", "d"))
        elif damage == "no hash":
            client.delete(name)
            client.set(name, b"text")
        else:
            client.hset(name, "v", b"many")
            client.hset(name, "d", b"")
    for key in ("a", "b"):
        assert await two.get("t", key) is None
        assert await two.put(a_record(key, a_ledger(["y"]), version=1))
        assert (await gateways().get("t", key)).version == 1
    assert two.events["corrupt"] == 2
    [line] = warnings(caplog)
    assert "a session in Redis is ignored and dropped" in line
    assert (await one.get("t", "a")) is not None  # whose copy is its own


async def test_a_key_of_another_type_is_no_failure_of_the_server(gateways, client, caplog):
    """However often it is met, and by whatever command."""
    one = gateways(max_timeouts=2)
    name, listing, ends = "turnkeep:1:s:t:a", "turnkeep:1:k:t", "turnkeep:1:e:t"

    def spoil(*keys):
        for key in keys:
            client.delete(key)
            client.set(key, "text")

    for version in range(1, 6):
        spoil(name, listing, ends)
        if version % 2:
            assert (await one.get("t", "a") is None) == (version == 1)
            assert client.type(name) == b"none"
        assert await one.put(a_record("a", a_ledger(["x"] * version), version=version))
        assert (client.type(name), client.type(listing), client.type(ends)) == (b"hash", b"zset", b"zset")
        assert (await gateways().get("t", "a")).version == version
    assert one.events["corrupt"] == 3
    # A page shows the others, and what is of another type goes.
    await one.put(a_record("b"))
    two = gateways()
    spoil(name)
    assert [record.key for record in (await two.page("t", after=None, limit=9)).records] == ["b"]
    assert client.type(name) == b"none"
    assert two.events["corrupt"] == 1
    spoil(listing)
    await two.page("t", after=None, limit=9)
    assert client.type(listing) == b"none"
    spoil(name, listing, ends)
    await one.delete("t", "a")
    assert client.hget(name, "v") == b"x"
    assert (one.link.up, two.link.up, one.unsaved, one.events["unsaved"]) == (True, True, 0, 0)
    assert not [line for line in warnings(caplog) if "cannot be used" in line]


async def test_a_record_that_is_too_large_stays_here(gateways, client):
    one, two = gateways(max_entry_bytes=10_000), gateways()
    large = a_record("s", a_large_ledger(10_000, 10))
    assert await one.put(large)
    assert await one.get("t", "s") == large
    assert await two.get("t", "s") is None
    assert one.events["oversized"] == 1


async def test_killed_and_started_again(gateways, server, caplog):
    caplog.set_level(logging.INFO)
    one, two = gateways(), gateways()
    await one.put(a_record("s", version=1))
    await one.put(a_record("other", version=1))
    await two.get("t", "s")
    server.kill()
    for version in range(2, 30):
        assert await one.put(a_record("s", a_ledger(["x"] * version), version=version))
        assert (await one.get("t", "s")).version == version
    assert await one.recognise("t", [b"n" * 16]) is None
    assert [record.key for record in (await one.page("t", after=None, limit=9)).records] == ["other", "s"]
    assert await one.delete("t", "other")
    assert await one.get("t", "other") is None
    assert not one.link.up
    assert (await two.get("t", "s")).version == 1  # a copy, until it can know better
    assert len([line for line in warnings(caplog) if "cannot be used" in line]) == 2  # one of each gateway
    started = time.perf_counter()
    for _ in range(200):
        await one.get("t", "s")
    assert time.perf_counter() - started < 0.5  # nobody waits for a server that is known to be gone
    server.start()
    await until(lambda: one.link.up and two.link.up and not one.unsaved)
    assert (await two.get("t", "s")).version == 29
    assert await two.get("t", "other") is None
    assert len([entry for entry in caplog.records if "can be used again" in entry.getMessage()]) == 2


async def test_frozen_for_a_while(gateways, server, caplog):
    one, two = gateways(budget=0.02, write_budget=0.02, max_timeouts=3), gateways()
    await one.put(a_record("s", version=1))
    await until(lambda: not one.unsaved)
    server.signal(signal.SIGSTOP)
    for version in range(2, 12):
        assert await one.put(a_record("s", version=version))
        assert (await one.get("t", "s")).version == version
    results = Counter(result for (_, result), count in one.link.calls.items() for _ in range(count))
    # Three calls wait for their budget; after them nobody does, but for one call now and then that tries.
    assert results["timeout"] >= 3
    assert results["skipped"] >= 10 > results["timeout"]
    assert len(warnings(caplog)) == 1
    server.signal(signal.SIGCONT)
    await until(lambda: one.link.up and not one.unsaved)
    assert (await two.get("t", "s")).version == 11
    # Answers that came late are nobody's: each call still gets its own.
    for number in range(20):
        assert await one.put(a_record(f"n{number}", version=number + 1))
    for number in range(20):
        assert (await two.get("t", f"n{number}")).version == number + 1


async def test_a_gateway_that_is_busy_does_not_blame_its_redis(gateways, caplog):
    """The loop is held up for longer than a turn waits for Redis, again and again, while more turns than connections run."""
    one = gateways(budget=0.01, write_budget=0.05, max_timeouts=3)
    await one.put(a_record("warm up"))
    over = False

    async def block():
        while not over:
            time.sleep(0.04)  # noqa: ASYNC251 - that is the point
            await asyncio.sleep(0)

    async def turns(key):
        for version in range(1, 6):
            assert await one.put(a_record(key, version=version))
            assert (await one.get("t", key)).version == version

    blocking = asyncio.create_task(block())
    await asyncio.gather(*(turns(f"s{number}") for number in range(64)))
    over = True
    await blocking
    results = {result for _, result in one.link.calls}
    assert results == {"ok"}, one.link.calls
    assert (one.link.up, one.events["unsaved"], warnings(caplog)) == (True, 0, [])


async def test_a_server_that_comes_and_goes_is_told_of_once_a_minute(server, caplog):
    caplog.set_level(logging.INFO)
    now = [1000.0]
    link = RedisLink(RedisConfig(server.url, budget=2.0, retry_interval=0.01), clock=lambda: now[0])

    def said():
        return [
            line.getMessage() for line in caplog.records if "cannot be used" in line.message or "can be used" in line.message
        ]

    for _ in range(3):
        link._gone("it flaps")
        await until(lambda: link.up)
        now[0] += 5
    assert len(said()) == 2
    now[0] += 60
    link._gone("it flaps")
    assert "(it flaps; 2 more times since this was last said)" in said()[-1]
    await until(lambda: link.up)
    # One that stays away is told of as soon as the minute is over.
    server.kill()
    link._gone("killed")
    await asyncio.sleep(0.05)
    assert len(said()) == 4
    now[0] += 60
    await until(lambda: len(said()) == 5)
    server.start()
    await until(lambda: link.up)
    assert len(said()) == 6
    await link.aclose()


async def test_emptied_in_the_middle(gateways, client):
    one, two = gateways(), gateways()
    await one.put(a_record("s", a_ledger(["a"]), version=4))
    client.flushall()
    assert (await one.get("t", "s")).version == 4
    assert await two.get("t", "s") is None
    assert await one.put(a_record("s", a_ledger(["a", "b"]), version=5))
    assert (await two.get("t", "s")).version == 5
    client.script_flush()
    assert await one.put(a_record("s", version=6))


async def test_what_was_written_while_they_were_apart_does_not_replace_what_is_newer(gateways, server):
    one, two = gateways(), gateways()
    await one.put(a_record("s", version=1))
    await two.get("t", "s")
    server.kill()
    for version in (2, 3):
        await one.put(at(a_record("s", version=version), used_at=10.0 + version))
    for version in (2, 3, 4):
        await two.put(at(a_record("s", version=version), used_at=20.0 + version))
    server.start()
    await until(lambda: one.link.up and two.link.up and not one.unsaved and not two.unsaved)
    winner = at(a_record("s", version=4), used_at=24.0)
    assert await one.get("t", "s") == winner
    assert await two.get("t", "s") == winner


async def test_a_server_that_is_full_is_no_error_of_anybody_s(gateways, client, caplog):
    client.config_set("maxmemory", "1mb")
    try:
        one = gateways(max_timeouts=3)
        for version in range(1, 30):
            assert await one.put(a_record("s", a_large_ledger(1000, 10), version=version))
        assert (await one.get("t", "s")).version == 29
        assert one.link.calls["write", "error"] >= 3
        [line] = warnings(caplog)
        assert "it refuses" in line
    finally:
        client.config_set("maxmemory", "0")
    await until(lambda: one.link.up and not one.unsaved)
    assert (await gateways().get("t", "s")).version == 29


async def test_nothing_secret_is_logged(caplog):
    config = RedisConfig("redis://user:hunter2@127.0.0.1:1/3")
    assert config.shown == "redis://127.0.0.1:1/3"
    store = RedisLedgerStore(MemoryLedgerStore(10**6), RedisLink(config))
    assert await store.put(a_record("s"))
    assert "127.0.0.1:1" in caplog.text
    assert "hunter2" not in caplog.text
    await store.aclose()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "http://x"}, "the Redis address .* must be redis://"),
        ({"url": "localhost:6379"}, "the Redis address .* must be redis://"),
        ({"url": "redis://:secret@h:port"}, "the Redis address .* must be redis://"),
        ({"budget": 0}, "redis.budget must be positive, not 0"),
        ({"ttl": -1}, "redis.ttl must be positive, not -1"),
        ({"max_timeouts": 0}, "redis.max_timeouts must be at least 1, not 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RedisConfig(**{"url": "redis://h"} | fields)
