"""The remote tier on a real redis-server: what one machine stores another loads, bounded and verified."""

import time

import numpy as np
import pytest
import redis

from offload.errors import TierUnavailable
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.remote_store import RemoteStore
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.redis_server import redis_server

KEY = digest_of(10**9)
BLOCK = 3000


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
        assert client.dbsize() == 5
    assert other.figures().evicted == 2


def test_damage_is_found_counted_and_thrown_away(remote, server):
    store = remote()
    store.store([outgoing(number, BLOCK) for number in range(4)])
    with redis.Redis(port=server.port) as client:
        names = [b"turnkeep:kv:" + KEY.hex().encode() + b":" + digest_of(number) for number in range(4)]
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
    assert guarded.store([outgoing(2, BLOCK)]) == []
    assert guarded.errors == 1, "it is left alone"
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
