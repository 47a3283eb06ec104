"""Subscribers over real sockets hold what the worker holds, whatever happens between them."""

import asyncio
import random

import pytest
from replica_harness import decode_message, running, simulated

from engine.server.listen import UnixAddress
from engine.simulation.config import CostModel
from prefix_cache.events import AllCleared, BlocksStored, EventBatch, Heartbeat, Snapshot
from prefix_cache.hashing import split_digests

FREE = CostModel(step=0.0, prefill_token=0.0, prefill_pair=0.0, decode_sequence=0.0, decode_context_token=0.0)


def body(request_id, prompt, **sampling):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling}


class Follower:
    """A subscriber as the protocol describes it: applies what it gets, reconnects with the last number it applied."""

    def __init__(self, replica, query=""):
        self.replica = replica
        self.query = query
        self.instance = None
        self.seq = 0
        self.held = set()
        self.snapshots = 0
        self.batches = 0

    async def follow(self, messages=None):
        """Reads until cancelled, or for so many messages."""
        query = self.query if self.instance is None else f"?instance={self.instance}&after={self.seq}"
        async with self.replica.session.get(self.replica.url + "/v1/kv_events" + query) as response:
            assert response.status == 200
            assert response.content_type == "application/x-ndjson"
            while messages is None or messages > 0:
                line = await response.content.readuntil(b"\n")
                self.apply(decode_message(line))
                messages = None if messages is None else messages - 1

    def apply(self, message):
        if isinstance(message, Snapshot):
            self.instance, self.seq = message.instance, message.seq
            self.held = set(split_digests(message.tiers.get("device", b"")))
            self.snapshots += 1
            return
        assert message.instance == self.instance
        if isinstance(message, Heartbeat):
            assert message.seq == self.seq
            return
        assert isinstance(message, EventBatch)
        assert message.seq == self.seq + 1
        self.seq = message.seq
        self.batches += 1
        for event in message.events:
            if isinstance(event, AllCleared):
                self.held.clear()
                continue
            digests = set(split_digests(event.digests))
            if isinstance(event, BlocksStored):
                assert not digests & self.held
                self.held |= digests
            else:
                assert digests <= self.held
                self.held -= digests

    async def catch_up(self, seq, follow):
        async with asyncio.timeout(20):
            while self.seq < seq:
                if follow.done():
                    follow.result()
                await asyncio.sleep(0.005)


async def churn(replica, name, rounds, width=8):
    """Requests of many sessions over a pool that holds few of them: stores, evictions, aborts."""
    chance = random.Random(name)

    async def one(number):
        prompt = [chance.randrange(3, 250) for _ in range(chance.randrange(1, 40))]
        prompt = [number % 5 + 3] * 64 + prompt + list(range(10, 10 + chance.randrange(200)))
        if chance.random() < 0.2:
            stream = await replica.session.post(replica.url + "/v1/generate", json=body(f"{name}-{number}", prompt))
            stream.close()
        else:
            await replica.generate(body(f"{name}-{number}", prompt))

    for start in range(0, rounds * width, width):
        await asyncio.gather(*(one(number) for number in range(start, start + width)))


async def metric(replica, name):
    lines = (await replica.get("/metrics"))[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"turnkeep_engine_{name} "))


async def subscribers(replica):
    return await metric(replica, "event_subscribers")


def held_by(replica):
    return set(split_digests(replica.core.snapshot().get("device", b"")))


async def test_followers_agree_with_the_worker_after_churn(load):
    async with running(load) as replica:
        steady, late, hopping = Follower(replica), Follower(replica), Follower(replica)
        tasks = {steady: asyncio.create_task(steady.follow())}
        hops = asyncio.create_task(hop(hopping))
        await churn(replica, "a", 6)
        tasks[late] = asyncio.create_task(late.follow())
        await churn(replica, "b", 6)
        await replica.idle()
        if hops.done():
            hops.result()  # it found something wrong
        hops.cancel()
        await asyncio.gather(hops, return_exceptions=True)
        tasks[hopping] = asyncio.create_task(hopping.follow())
        batches = await metric(replica, "kv_event_batches_total")
        for follower, task in tasks.items():
            await follower.catch_up(batches, task)
            assert follower.held == held_by(replica)
            assert follower.seq == batches
        stats = await replica.stats()
        assert len(steady.held) == stats.cached_blocks > 0
        assert steady.snapshots == late.snapshots == hopping.snapshots == 1  # everything after it was replayed
        assert steady.batches > late.batches
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def hop(follower):
    """Hangs up after every third message and comes back."""
    while True:
        await follower.follow(3)


async def test_who_comes_back_too_late_is_given_a_snapshot():
    async with running(lambda: simulated(num_blocks=40, max_model_len=512), event_batches=4) as replica:
        follower = Follower(replica)
        await follower.follow(1)
        assert (follower.snapshots, follower.seq) == (1, 0)
        await churn(replica, "a", 3)
        await replica.idle()
        await follower.follow(1)
        assert follower.snapshots == 2
        assert follower.held == held_by(replica)
        assert follower.seq > 4


async def test_a_follower_that_stops_reading_is_cut_off_and_holds_up_nobody(tmp_path, caplog):
    path = tmp_path / "replica.sock"
    load = lambda: simulated(num_blocks=300, vocab_size=200_000, cost=FREE)  # noqa: E731
    async with running(load, UnixAddress(path), write_timeout=0.5, event_batches=8) as replica:
        _, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.transport.pause_reading()
        writer.write(b"GET /v1/kv_events HTTP/1.1\r\nHost: replica\r\n\r\n")
        follower = Follower(replica)
        following = asyncio.create_task(follower.follow())
        async with asyncio.timeout(20):
            while await subscribers(replica) != 2:
                pass
        sent = 0
        async with asyncio.timeout(30):
            while await subscribers(replica) == 2:
                # 250 blocks stored and as many evicted: some 10 KB of events a request.
                await replica.generate(
                    body(f"r{sent}", range(sent * 4000 % 196_000, sent * 4000 % 196_000 + 4000), max_tokens=1)
                )
                sent += 1
        assert "the client took nothing for 0.5 seconds" in caplog.text
        await replica.idle()
        await follower.catch_up(sent, following)
        assert follower.held == held_by(replica)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        writer.close()


async def test_only_so_many_followers_at_once():
    async with running(simulated, max_subscribers=2) as replica:
        url = replica.url + "/v1/kv_events"
        first, second = await replica.session.get(url), await replica.session.get(url)
        await first.content.readline()
        await second.content.readline()
        async with replica.session.get(url) as third:
            assert third.status == 503
            assert int(third.headers["Retry-After"]) >= 1
            assert b"too_many_subscribers" in await third.read()
        first.close()
        async with asyncio.timeout(20):
            while True:
                third = await replica.session.get(url)
                if third.status == 200:
                    break
                third.close()
                await asyncio.sleep(0.01)
        assert isinstance(decode_message(await third.content.readline()), Snapshot)
        second.close()
        third.close()


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 30, "%20"])
async def test_numbers_of_batches_that_are_none(after):
    async with running(simulated) as replica:
        status, answer = await replica.get(f"/v1/kv_events?instance=x&after={after}")
        assert status == 400
        assert b'"field":"after"' in answer
