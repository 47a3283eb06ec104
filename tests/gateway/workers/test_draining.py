"""A worker that is drained finishes what it has and gets nothing new."""

import asyncio

import pytest
from dispatch_bench import Bench, everything
from fake_replica import DROP, HANG, FakeReplica, Wait, answer, until

from gateway.turn import TurnError
from gateway.workers.protocol import Done, Finished, Started, Tokens


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path, resume_wait=0.2)
    yield bench
    await bench.close()


async def finish(generation):
    chunks = await everything(generation)
    await generation.aclose()
    return chunks


async def test_streams_end_and_new_requests_go_elsewhere(bench):
    a = await bench.add("a")
    go = asyncio.Event()
    a.scripts.append([*answer((1,))[:2], Wait(go), Tokens((2,)), Finished("stop"), Done(40, 2, 0, 0, 0, 0, 0)])
    running = await bench.send("first")
    await running.started()
    b = await bench.add("b", instance="life-b")
    assert bench.dispatcher.drain("a", True)
    assert (bench.view("a").draining, bench.view("a").state, bench.view("b").draining) == (True, "ready", False)
    for number in range(5):
        await finish(await bench.send(f"r{number}"))  # of the session whose home is a
    assert (len(a.requests), len(b.requests)) == (1, 5)
    go.set()
    assert [chunk.token_ids for chunk in await finish(running) if isinstance(chunk, Tokens)] == [(1,), (2,)]
    assert bench.dispatcher.drain("a", False)
    bench.dispatcher.drain("b", True)
    await finish(await bench.send("again"))
    assert (len(a.requests), len(b.requests)) == (2, 5)
    assert not bench.dispatcher.drain("nobody", True)


async def test_when_all_are_drained_the_answer_says_so(bench):
    await bench.add("a")
    bench.dispatcher.drain("a", True)
    with pytest.raises(TurnError, match="a is draining") as caught:
        await bench.send()
    assert (caught.value.status, caught.value.code) == (503, "no_worker")
    assert bench.dispatcher.pool_info("m").model == "m"  # its streams still count their tokens


async def test_it_holds_over_a_restart_and_a_move(bench):
    a = await bench.add("a")
    bench.dispatcher.drain("a", True)
    await a.stop()
    await until(lambda: bench.state("a") == "down")
    path = bench.view("a").url.removeprefix("unix:")
    bench.replicas["a2"] = second = FakeReplica(instance="life-2")
    await second.start(path)
    await until(lambda: bench.state("a") == "ready")
    assert bench.view("a").draining
    bench.dispatcher.remove_worker("a")
    await bench.add("a", instance="life-3")
    assert bench.view("a").draining


async def test_a_worker_that_says_it_drains_gets_nothing_new(bench):
    a, b = await bench.add("a"), await bench.add("b", instance="life-b")
    a.draining = True
    await until(lambda: bench.view("a").draining)
    for number in range(6):
        await finish(await bench.send(f"r{number}", session=None, tokens=range(number * 100, number * 100 + 40)))
    assert (len(a.requests), len(b.requests)) == (0, 6)
    # Its successor under the same address is another one.
    a.draining, a.instance = False, "life-2"
    await until(lambda: bench.view("a").state == "ready" and not bench.view("a").draining)


async def test_what_a_drained_worker_loses_is_not_continued_there(bench):
    a = await bench.add("a", can_resume=True)
    go = asyncio.Event()
    a.default = [Started(40, 0, 0), Tokens((1,)), Wait(go), DROP]
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    b = await bench.add("b", instance="life-b", can_resume=True)
    b.default = [Started(40, 0, 0), Tokens((2,)), Finished("stop"), Done(40, 1, 0, 0, 0, 0, 0)]
    bench.dispatcher.drain("a", True)
    go.set()
    assert [chunk.token_ids async for chunk in chunks if isinstance(chunk, Tokens)] == [(2,)]
    assert (len(a.requests), len(b.requests)) == (1, 1)
    await generation.aclose()
    # Alone and drained it is not taken back for it either.
    a.default = [Started(40, 0, 0), Tokens((1,)), HANG]
    bench.dispatcher.drain("a", False)
    bench.dispatcher.drain("b", True)
    generation = await bench.send()
    chunks = generation.chunks()
    await anext(chunks)
    bench.dispatcher.drain("a", True)
    for stream in tuple(bench.dispatcher.pool.member("a").streams):
        stream.close()
    with pytest.raises(TurnError, match="a is draining") as caught:
        await anext(chunks)
    assert caught.value.code == "worker_lost"
