"""The remote tier on a real redis-server: what one machine stores another loads, bounded and verified."""

import random
import time
from collections import Counter

import numpy as np
import pytest
import redis

from offload.errors import TierUnavailable
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.remote_store import RemoteStore
from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.redis_server import redis_server

KEY = digest_of(10**9)
BLOCK = 3000
BOOKS = (b"used", b"order", b"meta", b"about")


@pytest.fixture(scope="module")
def shared_server():
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    if shared_server.process.poll() is not None:
        shared_server.start()
    with redis.Redis(port=shared_server.port) as client:
        client.flushall()
    return shared_server


@pytest.fixture
def remote(server):
    made = []

    def make(blocks=8, key=KEY):
        made.append(RemoteStore(server.url, key, BLOCK, blocks * (BLOCK + 8)))
        return made[-1]

    yield make
    for store in made:
        store.close()


def loaded(store, number):
    into = np.zeros(BLOCK, dtype=np.uint8)
    if not store.load(digest_of(number), into):
        return False
    np.testing.assert_array_equal(into, payload_of(number, BLOCK))
    return True


def test_what_one_stores_another_loads_once_it_has_looked(remote):
    one, other = remote(), remote()
    assert one.store([outgoing(1, BLOCK), outgoing(2, BLOCK)]) == [digest_of(1), digest_of(2)]
    other.refresh()
    assert other.prefix([digest_of(1), digest_of(2), digest_of(3)]) == 2
    assert [loaded(other, number) for number in (1, 2, 3)] == [True, True, False]
    stranger = remote(key=digest_of(5))
    stranger.refresh()
    assert not loaded(stranger, 1)


def test_the_bound_holds_over_all_who_store_and_the_oldest_go(remote, server):
    one, other = remote(blocks=4), remote(blocks=4)
    for number in range(4):
        one.store([outgoing(number, BLOCK)])
    assert loaded(one, 0)
    for number in range(4, 6):
        other.store([outgoing(number, BLOCK)])
    one.refresh()
    assert [loaded(one, number) for number in range(6)] == [True, False, False, True, True, True]
    with redis.Redis(port=server.port) as client:
        assert len(client.keys(one.books.prefix + b"*")) == 4 + len(BOOKS)
    assert one.figures().evicted == other.figures().evicted == 2, "totals are those of all who share it"
    assert one.figures().stored == 6


def test_damage_is_found_counted_and_thrown_away(remote, server):
    store = remote()
    store.store([outgoing(number, BLOCK) for number in range(4)])
    with redis.Redis(port=server.port) as client:
        names = [store.books.prefix + digest_of(number) for number in range(4)]
        client.setrange(names[0], 100, b"\x00\xff\x00\xff")
        client.set(names[1], client.get(names[2]))
        client.set(names[2], b"short")
        client.delete(names[3])
    assert [loaded(store, number) for number in range(4)] == [False] * 4
    assert store.figures().healed == 3
    store.refresh()
    assert store.figures().blocks == 0
    assert store.store([outgoing(0, BLOCK)]) == [digest_of(0)]
    assert loaded(store, 0)


def test_a_block_overwritten_while_it_is_copied_is_not_sent(remote):
    store = remote()
    assert store.store([outgoing(1, BLOCK)._replace(is_intact=lambda: False)]) == []
    store.refresh()
    assert store.figures().blocks == 0


def test_a_server_that_dies_takes_the_tier_along_and_brings_it_back(remote, server):
    now = [0.0]
    store = remote()
    # What looks after its blocks every few seconds might notice first that the server is gone.
    store._stop.set()
    store._thread.join()
    guarded = GuardedTier(store, TransferCost(0.01), clock=lambda: now[0])
    assert guarded.store([outgoing(1, BLOCK)]) == [digest_of(1)]
    server.kill()
    assert not guarded.load(digest_of(1), np.zeros(BLOCK, dtype=np.uint8))
    assert guarded.errors == 1
    assert not guarded.load(digest_of(1), np.zeros(BLOCK, dtype=np.uint8))
    assert guarded.errors == 1, "it is left alone"
    for _ in range(2):
        assert guarded.store([outgoing(2, BLOCK)]) == []
    assert guarded.errors == 2, "for writing too"
    server.start()
    now[0] += 2
    deadline = time.monotonic() + 20
    while guarded.store([outgoing(3, BLOCK)]) != [digest_of(3)]:
        now[0] += 60
        assert time.monotonic() < deadline
    assert loaded(store, 3)


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1"])
def test_a_url_that_is_none_is_said(url):
    with pytest.raises(TierUnavailable, match="remote: Redis URL"):
        RemoteStore(url, KEY, BLOCK, 1 << 20)


def test_a_server_that_is_not_there_is_not_waited_for():
    store = RemoteStore("redis://127.0.0.1:1/0", KEY, BLOCK, 1 << 20)
    assert store.prefix([digest_of(1)]) == 0
    with pytest.raises(TierUnavailable, match="Redis: "):
        store.store([outgoing(1, BLOCK)])
    store.close()


def order_of(store, names):
    """In which order these blocks go, seen by storing others until they are gone."""
    gone, number = [], 1000
    left = list(names)
    while left:
        assert number < 1100
        store.store([outgoing(number, BLOCK)])
        # What has just been stored must not go before what is asked about.
        store.mark([digest_of(number)], PINNED, expected=time.monotonic() + 3600)
        number += 1
        store.refresh()
        now_gone = [name for name in left if not store.prefix([digest_of(name)])]
        gone += now_gone
        left = [name for name in left if name not in now_gone]
    return gone


@pytest.mark.parametrize("kind", ["redis", "arena"])
def test_blocks_go_in_the_order_of_their_worth_as_in_every_other_tier(remote, arena, kind):
    tier = remote(blocks=9) if kind == "redis" else arena(slots=9)
    tier.refresh = getattr(tier, "refresh", lambda: None)
    now = time.monotonic()
    for number in range(9):
        tier.store([outgoing(number, BLOCK, depth=number)])
    tier.mark([digest_of(0)], SHARED, session=1)
    tier.mark([digest_of(1)], PINNED, expected=now + 900, session=1)
    tier.mark([digest_of(2)], WAITING, expected=now + 600, session=1)
    tier.mark([digest_of(3)], WAITING, expected=now + 60, session=1)
    tier.mark([digest_of(4)], SUPERSEDED, session=1)
    tier.mark([digest_of(5), digest_of(6)], IDLE, session=1)
    # Two sessions begin with it.
    tier.mark([digest_of(7)], IDLE, session=1)
    tier.mark([digest_of(7)], SUPERSEDED, session=2)
    assert tier.mark([digest_of(8), digest_of(99)], IDLE, session=3) == 1
    assert loaded(tier, 8), "used last of the idle ones"
    # Of a session the tail goes before the head, and of the same standing what was used longest ago.
    assert order_of(tier, range(9)) == [4, 6, 5, 8, 2, 3, 0, 7, 1]


def test_a_wait_or_a_pin_that_is_over_counts_for_nothing(remote, monkeypatch):
    store = remote(blocks=3)
    for number in range(3):
        store.store([outgoing(number, BLOCK)])
    store.mark([digest_of(0)], PINNED, expected=time.monotonic() + 0.05)
    assert wait_for(lambda: loaded_order(store) == [b"0"])
    store.store([outgoing(3, BLOCK)])
    store.refresh()
    assert [store.prefix([digest_of(number)]) for number in range(4)] == [1, 0, 1, 1], "it was used after block 1"
    store.store([outgoing(4, BLOCK), outgoing(5, BLOCK)])
    store.refresh()
    assert store.prefix([digest_of(0)]) == 0


def loaded_order(store):
    """Blocks whose foreseen time is over, by the server's clock."""
    client = store._client
    seconds, micro = client.time()
    over = client.zrangebyscore(store.books.prefix + b"until", "-inf", seconds + micro / 1e6)
    return [b"0"] * (over == [digest_of(0)])


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_each_kind_of_block_has_its_own_bound_and_is_never_taken_for_another(remote, server):
    one, other = remote(blocks=2), remote(blocks=5, key=digest_of(77))
    for number in range(20):
        one.store([outgoing(number, BLOCK)])
        other.store([outgoing(number, BLOCK)])
    for store, blocks in ((one, 2), (other, 5)):
        store.refresh()
        assert store.figures().blocks == blocks
    # The same block kept in another way, as long and under the same name: whole in itself, and foreign.
    with redis.Redis(port=server.port) as client:
        client.set(one.books.prefix + digest_of(19), client.get(other.books.prefix + digest_of(19)))
    assert not loaded(one, 19)
    assert loaded(other, 19)
    assert one.figures().healed == 1


def test_what_another_version_left_is_named_and_not_read(remote, server, caplog):
    with redis.Redis(port=server.port) as client:
        client.sadd("turnkeep:kv:formats", 1)
        client.set(b"turnkeep:kv:1:{" + KEY.hex().encode() + b"}:" + digest_of(1), b"old")
    with caplog.at_level("WARNING"):
        store = remote()
        said = "Redis holds KV blocks of another version (format 1), which are not read"
        assert wait_for(lambda: said in caplog.text)
    assert store.figures().blocks == 0


def test_what_redis_throws_away_itself_is_missing_and_leaves_the_books(remote, server):
    store = remote()
    store.store([outgoing(number, BLOCK) for number in range(3)])
    store.refresh()
    with redis.Redis(port=server.port) as client:
        client.delete(store.books.prefix + digest_of(1))
        assert not loaded(store, 1)
        store.refresh()
        assert (store.figures().blocks, store.figures().healed) == (2, 0)
        client.delete(*(store.books.prefix + name for name in BOOKS))
        store.refresh()
        assert store.figures().blocks == 0
        assert store.store([outgoing(0, BLOCK)]) == [digest_of(0)]
        assert loaded(store, 0)
        assert all(0 < client.ttl(name) <= 14 * 86400 for name in client.keys(store.books.prefix + b"*"))


def damage_one(client, store, number, chance):
    """One random damage to what Redis holds of a block."""
    name = store.books.prefix + digest_of(number)
    value = bytearray(client.get(name))
    other = (number + 1 + chance.randrange(11)) % 12
    kind = chance.choice(["flip", "flip", "cut", "swap", "stale", "foreign", "longer"])
    if kind == "flip":
        value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del value[chance.randrange(len(value)) :]
    elif kind == "swap":
        value = bytearray(client.get(store.books.prefix + digest_of(other)))
    elif kind == "stale":
        # An index that names what lies there by the name of a block that was here once.
        value = bytearray(client.get(store.books.prefix + digest_of(number)))
        value[8:] = payload_of(number + 500, BLOCK).tobytes()
    elif kind == "foreign":
        value = bytearray(client.get(b"turnkeep:kv:2:{" + digest_of(77).hex().encode() + b"}:" + digest_of(number)))
    else:
        value += b"\0"
    client.set(name, bytes(value))
    return kind


def test_a_thousand_corruptions_in_redis_give_no_wrong_block(remote, server):
    chance = random.Random(11)
    store, foreign = remote(blocks=16), remote(blocks=16, key=digest_of(77))
    foreign.store([outgoing(number, BLOCK) for number in range(12)])
    store.store([outgoing(number, BLOCK) for number in range(12)])
    kinds = Counter()
    with redis.Redis(port=server.port) as client:
        for round_ in range(1000):
            number = chance.randrange(12)
            kinds[damage_one(client, store, number, chance)] += 1
            assert not loaded(store, number)
            assert store.figures().healed == round_ + 1
            assert loaded(store, (number + 1) % 12)
            assert store.store([outgoing(number, BLOCK)]) == [digest_of(number)]
            assert loaded(store, number)
    assert len(kinds) == 6
    assert min(kinds.values()) > 50


def test_a_look_in_the_middle_of_a_drop_does_not_bring_a_block_back(remote):
    store = remote()
    store.store([outgoing(1, BLOCK), outgoing(2, BLOCK)])
    drop = store.books.drop

    def looked_at(digests, counted):
        store._looked_at = None
        store.refresh()
        assert store.prefix([digest_of(1)]) == 1
        return drop(digests, counted)

    store.books.drop = looked_at
    assert store.evict([digest_of(1)]) == 1
    assert store.prefix([digest_of(1)]) == 0
    assert store.store([outgoing(1, BLOCK)]) == [digest_of(1)]
    assert loaded(store, 1)


def test_books_that_are_no_books_are_begun_anew_and_give_no_wrong_block(remote, server):
    store = remote()
    with redis.Redis(port=server.port) as client:
        for name in BOOKS:
            client.set(store.books.prefix + name, b"somebody wrote here")
            with pytest.raises(TierUnavailable, match="Redis: "):
                store.store([outgoing(1, BLOCK)])
            client.delete(store.books.prefix + name)
    store.refresh()
    assert store.store([outgoing(1, BLOCK)]) == [digest_of(1)]
    assert loaded(store, 1)
