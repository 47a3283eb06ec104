"""KV events as vLLM publishes them: who follows them, and hashes in their own way, knows what the replica holds."""

import asyncio
import random
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families
from replica_harness import running, simulated, tokens_of

from engine.server.listen import ListenError
from engine.server.vllm.token_book import TokenBook
from engine.simulation.config import CostModel
from gateway.workers.protocol import GenerateRequest, Tokens
from gateway.workers.vllm.events import VllmEvents
from prefix_cache.events import Heartbeat
from prefix_cache.hashing import block_digests, namespace_digest, pack_tokens, root_digest, split_digests
from prefix_cache.index import ResidencyIndex

FREE = CostModel(step=0.0, prefill_token=0.0, prefill_pair=0.0, decode_sequence=0.0, decode_context_token=0.0)


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def body(request_id, prompt, salt=None, **sampling):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    made = {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling}
    return made | ({"cache_salt": salt} if salt else {})


class Follower:
    """The gateway's own client for vLLM's events, and an index of what it says."""

    def __init__(self, core, events, replay):
        self.core = core
        self.index = ResidencyIndex()
        self.client = VllmEvents("http://replica", events, replay, "", timeout=5)

    async def follow(self):
        async for message in self.client.follow(self.core.info, None, 0):
            self.index.apply("w", message)

    def digests(self):
        return {digest for digest in self.index._masks if self.index.tiers("w", digest)}

    async def agrees(self):
        """Waits until the follower holds what the engine's own snapshot holds."""
        async with asyncio.timeout(10):
            while self.digests() != set(split_digests(self.core.snapshot()["device"])):  # noqa: ASYNC110 - another party
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("blocks", [24, 256])
async def test_followers_know_what_the_replica_holds(blocks):
    """Also of generated tokens, salted prompts, several choices, and what is evicted; also those who come late."""
    core = simulated(num_blocks=blocks, vocab_size=320, max_num_batched_tokens=64, cost=FREE)
    events, replay = address(), address()
    early, late = Follower(core, events, replay), Follower(core, events, replay)
    chance = random.Random(blocks)
    system = [chance.randrange(3, 320) for _ in range(40)]
    async with running(lambda: core, kv_events=events, kv_replay=replay) as replica:
        tasks = [asyncio.create_task(early.follow())]
        async with asyncio.timeout(10):
            while early.index.position("w") is None:  # noqa: ASYNC110 - another party
                await asyncio.sleep(0.01)

        async def turn(number):
            prompt = system + [chance.randrange(3, 320) for _ in range(chance.randrange(1, 60))]
            more = {"n": 2, "temperature": 1.0, "seed": number} if number % 4 == 0 else {}
            chunks = await replica.generate(
                body(f"r{number}", prompt, "salt" if number % 3 == 0 else None, max_tokens=20, **more)
            )
            assert len(tokens_of(chunks)) == 20

        for start in range(0, 24, 4):
            await asyncio.gather(*(turn(number) for number in range(start, start + 4)))
        await replica.idle()
        tasks.append(asyncio.create_task(late.follow()))
        await early.agrees()
        await late.agrees()
        assert len(early.digests()) > 12
        assert (early.client.lost, early.client.garbage, early.client.blocks.unknown_parents) == (0, 0, 0)
        assert late.client.replayed > 10
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        early.client.close()
        late.client.close()


async def test_silence_is_a_heartbeat(monkeypatch):
    monkeypatch.setattr("gateway.workers.vllm.events._HEARTBEAT_SECONDS", 0.02)
    core, events, replay = simulated(), address(), address()
    async with running(lambda: core, kv_events=events, kv_replay=replay):
        client = VllmEvents("http://replica", events, replay, "", timeout=5)
        messages = client.follow(core.info, None, 0)
        await anext(messages)
        assert await anext(messages) == Heartbeat(core.info.instance, 0)
        await messages.aclose()
        client.close()


async def test_a_taken_address_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError, match=r"Cannot publish KV events at tcp://127\.0\.0\.1"):
            async with running(simulated, kv_events=f"tcp://127.0.0.1:{taken.getsockname()[1]}"):
                pass


async def test_metrics_have_vllm_s_names():
    core = simulated(cost=FREE)
    async with running(lambda: core) as replica:
        await replica.generate(body("r1", range(3, 103), max_tokens=5))
        await replica.generate(body("r2", range(3, 103), max_tokens=5))
        await replica.idle()
        text = (await replica.get("/metrics"))[1].decode()
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    labels = {"model_name": core.info.model, "engine": "0"}
    for name, value in {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": 200,
        "vllm:generation_tokens_total": 10,
        "vllm:prefix_cache_queries_total": 200,
        "vllm:prefix_cache_hits_total": 96,
        "vllm:num_preemptions_total": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
    }.items():
        assert (found[name].value, found[name].labels) == (value, labels), name
    success = found["vllm:request_success_total"]
    assert (success.value, success.labels) == (2, {**labels, "finished_reason": "length"})
    assert found["vllm:cache_config_info"].labels["block_size"] == "16"


NAMESPACE = namespace_digest({"model": "m"})


class Stream:
    def __init__(self, request_id):
        self.request_id = request_id


def test_the_book_knows_blocks_across_prompt_and_answer_and_forgets_the_oldest():
    book = TokenBook(NAMESPACE, 4, max_blocks=6)
    book.began(GenerateRequest(request_id="a", token_ids=[1, 2, 3, 4, 5, 6], cache_salt="s"))
    book.chunk_arrived(Stream("a"), Tokens((7, 8, 9)), 0.0)
    book.chunk_arrived(Stream("a"), Tokens((70, 80), 1), 0.0)
    root = root_digest(NAMESPACE, "s")
    first, second = block_digests([1, 2, 3, 4, 5, 6, 7, 8], root, 4)
    assert book.tokens(first) == pack_tokens([1, 2, 3, 4])
    assert book.tokens(second) == pack_tokens([5, 6, 7, 8])
    assert book.tokens(block_digests([1, 2, 3, 4, 5, 6, 70, 80], root, 4)[1]) == pack_tokens([5, 6, 70, 80])
    assert (book.is_root(root), book.salt(root), book.is_root(first)) == (True, "s", False)
    book.forget("a")
    book.chunk_arrived(Stream("a"), Tokens((1,) * 40), 0.0)
    assert len(book) == 3
    book.began(GenerateRequest(request_id="b", packed_token_ids=pack_tokens(range(100, 120))))
    assert len(book) == 6
    assert book.tokens(first) is None
