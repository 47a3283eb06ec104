"""What the pool says of its workers together follows every change of one of them."""

import pytest
from dispatch_bench import everything
from fake_replica import answer, until

from gateway.turn import TurnError


def candidates(bench, model="m"):
    return {member.name for member in bench.dispatcher.pool.candidates(model, frozenset())}


async def test_workers_come_and_go(bench):
    pool = bench.dispatcher.pool
    with pytest.raises(TurnError):
        pool.info("m")
    await bench.add("a", max_model_len=900)
    assert pool.info("m").max_model_len == 900
    assert candidates(bench) == {"a"}
    await bench.add("b", max_model_len=500)
    assert pool.info("m").max_model_len == 500
    assert candidates(bench) == {"a", "b"}
    assert {member.name for member in pool.candidates("m", {"a"})} == {"b"}
    bench.dispatcher.remove_worker("b")
    assert pool.info("m").max_model_len == 900
    assert candidates(bench) == {"a"}
    bench.dispatcher.remove_worker("a")
    with pytest.raises(TurnError):
        pool.info("m")
    assert candidates(bench) == set()


async def test_a_worker_in_another_life_may_be_another(bench):
    pool = bench.dispatcher.pool
    replica = await bench.add("a", max_model_len=900)
    assert pool.info("m").max_model_len == 900
    assert pool.adapter("m") is None
    replica.max_model_len, replica.instance = 400, "life-2"
    await until(lambda: pool.info("m").max_model_len == 400 if bench.state("a") == "ready" else False)
    assert candidates(bench) == {"a"}


async def test_what_one_is_asked_for_at_once_is_not_remembered(bench):
    replica = await bench.add("a")
    await bench.add("b")
    assert candidates(bench) == {"a", "b"}
    bench.dispatcher.drain("a", True)
    assert candidates(bench) == {"b"}
    bench.dispatcher.drain("a", False)
    assert candidates(bench) == {"a", "b"}
    replica.draining = True
    await until(lambda: candidates(bench) == {"b"})
    replica.draining = False
    await until(lambda: candidates(bench) == {"a", "b"})
    replica.unhealthy = "It is loading."
    replica.instance = "life-2"
    await until(lambda: candidates(bench) == {"b"})


async def test_the_router_knows_what_was_generated_when_it_places_the_next_turn(bench, monkeypatch):
    told = []
    monkeypatch.setattr(bench.dispatcher.router, "generated", lambda worker, tokens: told.append((worker, tokens)))
    replica = await bench.add("a")
    replica.scripts = [answer(range(9)), answer(range(3)), answer([7] * 300)]
    await everything(await bench.send())
    assert told == []
    await everything(await bench.send("r2"))
    assert told == [("a", 9)]
    long = await bench.send("r3", session="other")
    assert told == [("a", 9), ("a", 3)]
    # Of a long answer it hears while it is written.
    await everything(long)
    assert told[2:] == [("a", 256)]
    bench.dispatcher.remove_worker("a")
    await bench.add("a")
    await bench.send("r4")
    assert told[3:] == []
