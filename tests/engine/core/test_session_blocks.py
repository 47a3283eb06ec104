"""What a gateway says of sessions decides which of their blocks are there when they come back."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import Driver, make_engine, random_prompt, wire

from engine.models.registry import load_model
from gateway.workers.protocol import RetentionHint
from offload.config import OffloadConfig
from prefix_cache.events import DISK, HOST


def turn(driver: Driver, session: str, prompt: list[int], number: list[int] = [0]) -> int:  # noqa: B006 - a counter
    """One turn of a session; returns how many tokens were not computed."""
    number[0] += 1
    name = f"{session}-{number[0]}"
    request = wire(name, prompt, max_tokens=1)
    import msgspec

    driver.engine.add(driver.engine.prepare(msgspec.structs.replace(request, session=session, tenant="t")))
    while driver.engine.has_work() or driver.engine.stats().loading:
        driver.step()
    return driver.seen[name].started.cached_tokens


def hint(session: str, **settings) -> RetentionHint:
    return RetentionHint(session=session, tenant="t", request_id="r", **settings)


@pytest.fixture
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("llama"), dtype=torch.float32)


def prompts(count: int) -> dict[str, list[int]]:
    return {f"s{index}": random_prompt(index, 33) for index in range(count)}


def test_on_the_device_waiting_sessions_stay_longer_than_idle_ones_and_closed_ones_go_first(model):
    driver = Driver(make_engine(model, num_blocks=34))
    asked = prompts(5)
    for name in ("s0", "s1", "s2", "s3"):
        turn(driver, name, asked[name])
    driver.engine.retain([hint("s0", return_p50=2.0, return_p90=5.0), hint("s2", state="closed")])
    turn(driver, "s4", asked["s4"])
    turn(driver, "s5", random_prompt(77, 33))
    assert turn(driver, "s0", asked["s0"]) == 32
    assert turn(driver, "s2", asked["s2"]) == 0
    assert driver.engine.stats().lost_blocks_total == 0, "a closed session has lost nothing"
    assert turn(driver, "s1", asked["s1"]) == 0
    assert driver.engine.stats().lost_blocks_total == 8
    driver.engine.check_integrity()


def test_a_pin_holds_and_its_release_ends_it(model):
    driver = Driver(make_engine(model, num_blocks=26))
    asked = prompts(2)
    for name in asked:
        turn(driver, name, asked[name])
    driver.engine.retain([hint("s0", ttl=600.0), hint("s1", ttl=600.0)])
    for seed in range(50, 54):
        turn(driver, "", random_prompt(seed, 33))
    driver.engine.retain([hint("s1", state="released")])
    for seed in range(60, 63):
        turn(driver, "", random_prompt(seed, 33))
    assert turn(driver, "s0", asked["s0"]) == 32
    assert turn(driver, "s1", asked["s1"]) == 0


def test_hints_of_sessions_that_nobody_knows_are_ignored(model):
    driver = Driver(make_engine(model, num_blocks=26))
    driver.engine.retain([hint("nobody", return_p50=1.0, return_p90=2.0), hint("nobody", state="closed"), hint("x", ttl=1.0)])
    assert turn(driver, "s0", random_prompt(0, 33)) == 0


def test_turns_of_sessions_that_began_earlier_go_first_and_nobody_waits_for_ever(model):
    import msgspec

    engine = make_engine(
        model, num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64, policy="sessions", door=None, overtakes=6
    )
    driver = Driver(engine)

    def add(name: str, session: str | None) -> None:
        request = msgspec.structs.replace(wire(name, random_prompt(len(name), 9), max_tokens=1), session=session)
        engine.add(engine.prepare(request))

    add("old-1", "old")
    while engine.has_work():
        driver.step()
    add("running", None)
    driver.step()
    for name, session in (("new-1", "new"), ("plain", None), ("old-2", "old"), ("new-2", "new"), ("old-3", "old")):
        add(name, session)
    ended = []
    while engine.has_work():
        ended += [name for name, chunk in driver.step() if type(chunk).__name__ == "Done"]
    assert [name for name in ended if name != "running"] == ["old-2", "old-3", "new-1", "new-2", "plain"]
    # From the sixth arrival after "patient" on none goes before it, however old its session is.
    add("blocker", None)
    driver.step()
    add("patient", None)
    for number in range(4, 12):
        add(f"old-{number}", "old")
    ended = []
    while engine.has_work():
        ended += [name for name, chunk in driver.step() if type(chunk).__name__ == "Done"]
    assert ended.index("patient") == 5


@pytest.fixture
def tiered(model, tmp_path: Path) -> Iterator[Driver]:
    config = OffloadConfig(
        host_bytes=64 << 20, disk=tmp_path / "disk", disk_bytes=64 << 20, disk_min_free=0, load="always", shared_memory=tmp_path
    )
    engine = make_engine(model, num_blocks=26, offload=config)
    yield Driver(engine)
    engine.close()


def settled(driver: Driver, done) -> None:
    """Until what the keeper's thread does has come about."""
    import time

    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["predicted", "asked"])
def test_what_lies_on_disk_only_is_in_memory_before_the_session_is_back(tiered, how):
    prompt = random_prompt(3, 33)
    turn(tiered, "s", prompt)
    engine = tiered.engine
    assert engine.wait_for_tiers(60)
    host, disk = (tier.inner for tier in engine._tiers._stack.tiers)
    settled(tiered, lambda: disk.figures().blocks == 8)
    host.table.clear()
    engine.clear_cache()
    engine.retain([hint("s", return_p50=0.01, return_p90=5.0) if how == "predicted" else hint("s", state="prefetch")])
    settled(tiered, lambda: host.figures().blocks == 8)
    assert turn(tiered, "s", prompt) == 32
    assert engine._tiers.loaded_blocks == {HOST: 8}
    stats = engine.stats()
    assert (stats.prefetched_blocks_total, stats.useless_prefetches_total) == (8, 0)
    assert {tier.name for tier in stats.tiers} == {HOST, DISK}


def test_blocks_that_host_memory_has_given_up_are_stored_again_while_the_device_has_them(tiered):
    prompt = random_prompt(3, 33)
    turn(tiered, "s", prompt)
    engine = tiered.engine
    assert engine.wait_for_tiers(60)
    host = engine._tiers._stack.tiers[0].inner
    host.table.clear()
    assert turn(tiered, "s", prompt) == 32  # of the device; ends, and the keeper looks
    settled(tiered, lambda: bool(engine._tiers._keeper._missing) or host.figures().blocks >= 8)
    turn(tiered, "other", random_prompt(8, 5))
    assert engine.wait_for_tiers(60)
    settled(tiered, lambda: host.figures().blocks >= 8)


@pytest.mark.parametrize("how", ["predicted", "asked"])
def test_a_session_that_has_lost_its_blocks_has_them_back_on_the_device_before_its_turn(tiered, how):
    prompt = random_prompt(3, 33)
    turn(tiered, "s", prompt)
    expected = tiered.seen.popitem()[1].tokens
    engine = tiered.engine
    assert engine.wait_for_tiers(60)
    engine.clear_cache()
    engine._runner._kv.fill_(7.0)
    engine.retain([hint("s", return_p50=0.01, return_p90=50.0) if how == "predicted" else hint("s", state="prefetch")])

    def fetched() -> bool:
        if engine.has_work():
            tiered.step()
        return engine.stats().fetched_blocks_total == 8

    settled(tiered, fetched)
    assert engine.stats().cached_blocks == 8
    # The session goes on from there: nothing is loaded any more, and nothing was computed from what lay there before.
    assert turn(tiered, "s", prompt) == 32
    assert tiered.seen.popitem()[1].tokens == expected
    assert engine._tiers.loaded_blocks == {}
    stats = engine.stats()
    assert (stats.useful_fetches_total, stats.useless_fetches_total) == (8, 0)


def test_a_request_that_needs_the_room_has_it_while_a_fetch_hangs(tiered):
    prompt = random_prompt(3, 65)
    turn(tiered, "s", prompt)
    engine = tiered.engine
    assert engine.wait_for_tiers(60)
    engine.clear_cache()
    entered, let_go = threading.Event(), threading.Event()
    host, disk = (tier.inner for tier in engine._tiers._stack.tiers)
    load = disk.load
    disk.load = lambda digest, into: (entered.set(), let_go.wait(60), load(digest, into))[2]
    host.table.clear()
    engine._tiers.reach = lambda digests: len(digests)
    engine.retain([hint("s", state="prefetch")])
    settled(tiered, lambda: (engine.has_work() and tiered.step(), entered.is_set())[1])
    assert engine.stats().free_blocks == 10
    assert turn(tiered, "", random_prompt(9, 97)) == 0, "25 blocks of 26"
    let_go.set()
    assert engine.wait_for_tiers(60)
    engine.check_integrity()
    assert turn(tiered, "s", prompt) == 64
