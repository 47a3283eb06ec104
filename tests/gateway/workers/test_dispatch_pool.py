"""Workers that come, go, freeze and do not belong, as a dispatcher sees them."""

import asyncio
import logging

import pytest
from dispatch_bench import ROOT, Bench, everything
from fake_replica import HANG, FakeReplica, Wait, answer, until

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import TurnError
from gateway.workers.protocol import Done, Finished, Started, Tokens
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored
from prefix_cache.hashing import block_digests, join_digests


async def test_a_dead_worker_is_down_at_once_and_back_when_it_is(bench):
    a = await bench.add("a")
    path = bench.view("a").url.removeprefix("unix:")
    await a.stop()
    with pytest.raises(TurnError) as caught:
        await bench.send()
    assert (caught.value.status, caught.value.code) == (503, "no_worker")
    assert bench.state("a") == "down"
    with pytest.raises(TurnError, match="a is down"):
        bench.dispatcher.pool_info("m")
    bench.replicas["a2"] = successor = FakeReplica(instance="life-2")
    await successor.start(path)
    await until(lambda: bench.state("a") == "ready")
    generation = await bench.send()
    await everything(generation)
    await generation.aclose()
    await until(lambda: bench.dispatcher.index.position("a").instance == "life-2")


async def test_a_busy_worker_is_not_condemned_by_its_probes(bench):
    replica = await bench.add("a")
    replica_stats = replica._stats
    steps = [asyncio.Event() for _ in range(5)]
    script = [Started(40, 0, 0.0)]
    for event in steps:
        script += [Wait(event), Tokens((1,))]
    replica.scripts.append([*script, Finished("stop"), Done(40, 5, 0, 0, 0, 0, 0)])
    generation = await bench.send()
    chunks = generation.chunks()
    await generation.started()
    replica.frozen = True
    for event in steps:
        await asyncio.sleep(0.15)
        event.set()
        assert isinstance(await anext(chunks), Tokens)
    assert bench.state("a") == "ready"
    assert replica_stats is not None
    assert [type(chunk) for chunk in [chunk async for chunk in chunks]] == [Finished, Done]
    replica.frozen = False
    await generation.aclose()


async def test_a_frozen_worker_is_down_after_a_while_and_its_streams_end(bench):
    replica = await bench.add("a")
    replica.scripts.append([*answer()[:2], HANG])
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    replica.frozen = True
    with pytest.raises(TurnError, match="lost"):
        async with asyncio.timeout(5):
            await anext(chunks)
    assert bench.state("a") == "down"
    assert bench.books_are_empty()
    await generation.aclose()
    replica.frozen = False
    await until(lambda: bench.state("a") == "ready")


async def test_silent_workers_are_only_used_when_there_are_no_others(bench):
    a, b = await bench.add("a"), await bench.add("b")
    bench.dispatcher.pool._members["a"].missed = 1
    assert [member.name for member in bench.dispatcher.pool.candidates("m", set())] == ["b"]
    assert [member.name for member in bench.dispatcher.pool.candidates("m", {"b"})] == ["a"]
    assert (a.requests, b.requests) == ([], [])


async def test_workers_that_do_not_belong_are_kept_apart(bench, caplog):
    caplog.set_level(logging.WARNING)
    await bench.add("a")
    await bench.add("model", ready=False, model="other")
    await bench.add("space", ready=False, namespace="11" * 16)
    await bench.add("block", ready=False, block_size=8)
    await bench.add("old", ready=False, protocol_version=0)
    for name in ("model", "space", "block", "old"):
        await until(lambda name=name: bench.state(name) == "mismatched")
    assert "serves model 'other'" in bench.view("model").detail
    assert "not interchangeable" in bench.view("space").detail
    assert "block_size is 8" in bench.view("block").detail
    assert "version 0" in bench.view("old").detail
    assert sum("space is mismatched" in message for message in caplog.messages) == 1
    for number in range(8):
        generation = await bench.send(tokens=range(number * 50, number * 50 + 40), session=None)
        assert generation.receipt.worker == "a"
        await everything(generation)
        await generation.aclose()
    assert bench.dispatcher.models() == ("m",)
    # When the only worker they disagree with is gone, one of the others is what the pool is.
    bench.dispatcher.remove_worker("a")
    await until(lambda: any(bench.state(name) == "ready" for name in ("model", "space", "block")))


async def test_pool_info_and_models(bench):
    with pytest.raises(TurnError, match="none is up, they are starting or restarting") as caught:
        bench.dispatcher.pool_info("m")
    assert (caught.value.status, caught.value.retry_after) == (503, 2.0)
    assert bench.dispatcher.models() == ()
    await bench.add("a", max_model_len=1000)
    await bench.add("b", max_model_len=600)
    assert bench.dispatcher.pool_info("m").max_model_len == 600
    with pytest.raises(TurnError, match=r"no model 'x' here\. Models are: 'm'") as caught:
        bench.dispatcher.pool_info("x")
    assert (caught.value.status, caught.value.param) == (404, "model")
    with pytest.raises(TurnError) as caught:
        await bench.send(model="x")
    assert caught.value.status == 404


async def test_given_models_and_aliases(tmp_path):
    bench = Bench(tmp_path, models=("m", "n"), aliases={"gpt": "m"})
    try:
        assert bench.dispatcher.models() == ("m", "n", "gpt")
        await bench.add("a")
        await bench.add("b", model="n", namespace="22" * 16)
        await bench.add("c", ready=False, model="z")
        await until(lambda: bench.state("c") == "mismatched")
        for model, worker in (("gpt", "a"), ("m", "a"), ("n", "b")):
            generation = await bench.send(model=model)
            assert generation.receipt.worker == worker
            await everything(generation)
            await generation.aclose()
    finally:
        await bench.close()


async def test_a_removed_workers_turns_fail_over_or_end(bench):
    a, b = await bench.add("a"), await bench.add("b")
    a.default = b.default = [b"\n", HANG]
    waiting = await bench.send("w")
    name = waiting.receipt.worker
    (b if name == "a" else a).default = None
    bench.dispatcher.remove_worker(name)
    assert (await waiting.started()).prompt_tokens == 40
    assert waiting.receipt.worker != name
    await everything(waiting)
    await waiting.aclose()
    bench.dispatcher.remove_worker("nobody")
    assert [view.name for view in bench.dispatcher.workers()] == ["b" if name == "a" else "a"]
    assert bench.dispatcher.index.position(name) is None


async def test_adding_the_same_address_again_keeps_the_worker(bench):
    replica = await bench.add("a")
    member = bench.dispatcher.pool._members["a"]
    bench.dispatcher.add_worker("a", bench.view("a").url)
    assert bench.dispatcher.pool._members["a"] is member
    assert replica.event_subscribers == 1


async def test_events_reach_the_index_over_gaps_drops_and_restarts(bench):
    replica = await bench.add("a")
    digests = block_digests(list(range(40)), ROOT, 4)
    index = bench.dispatcher.index
    replica.log.append([BlocksStored(join_digests(digests[:6]), ROOT)])
    await until(lambda: index.lookup(digests) == {"a": 6})
    replica.log.append([BlocksRemoved(join_digests(digests[4:6]))])
    await until(lambda: index.lookup(digests) == {"a": 4})
    # The stream breaks; what happened meanwhile is replayed.
    replica.drop_events.set()
    await until(lambda: replica.event_subscribers == 0)
    replica.log.append([BlocksStored(join_digests(digests[4:9]), digests[3])])
    replica.drop_events.clear()
    await until(lambda: index.lookup(digests) == {"a": 9})
    replica.log.append([AllCleared()])
    await until(lambda: index.lookup(digests) == {})
    assert bench.view("a").events_lag < 2
    generation = await bench.send(tokens=range(40))
    assert generation.receipt.matched_tokens == 0
    await generation.aclose()


async def test_after_a_restart_of_the_gateway_the_index_is_whole_with_the_first_contact(tmp_path, bench):
    replica = await bench.add("a")
    prompts = [block_digests(list(range(seed * 10_000, seed * 10_000 + 4000)), ROOT, 4) for seed in range(20)]
    replica.blocks["device"] = [digest for prompt in prompts for digest in prompt[:900]]
    replica.blocks["host"] = [digest for prompt in prompts for digest in prompt[800:]]
    replica.log.append([BlocksStored(join_digests(prompts[0]), ROOT)])
    second = PoolDispatcher(PoolConfig(poll_interval=0.02))
    try:
        second.add_worker("a", bench.view("a").url)
        await second.wait_ready(1, 10)
        await until(lambda: second.index.position("a") is not None)
        # No event was needed but the snapshot that the first subscription begins with.
        assert replica.event_subscribers == 2
        for prompt in prompts:
            assert second.residency(prompt) == {"a": 1000}
        assert second.index.lookup_tiers(prompts[3])[1]["a"].host == 100
    finally:
        await second.__aexit__()
