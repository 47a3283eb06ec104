"""Tokens and books of an engine whose pool is too small for what it is asked, with tiers below it.

The reference is transformers in float32, as in test_exactness; through the tiers nothing may change but the time it takes.
"""

import random
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from engine_harness import Driver, make_engine, random_prompt, wire
from test_exactness import GENERATED, MODELS, Case

from engine.models.registry import load_model
from offload.config import OffloadConfig
from offload.errors import TierUnavailable
from prefix_cache.events import DEVICE, DISK, HOST, BlocksRemoved, BlocksStored
from prefix_cache.hashing import split_digests
from tests.redis_server import redis_server

MIB = 1 << 20
SMALL_POOL = 40


@pytest.fixture(params=["qwen3"], scope="module")
def case(request, tiny_checkpoint):
    arch, overrides = MODELS[request.param]
    return Case(tiny_checkpoint(arch, **overrides))


@pytest.fixture
def tiered(tmp_path: Path):
    """Makes engines with tiers in this test's directory; all of them are closed."""
    engines = []

    def make(model, *, host=True, disk=False, patient=True, **settings):
        offload = OffloadConfig(
            host_bytes=64 * MIB if host else 0,
            disk=tmp_path / "disk" if disk else None,
            disk_bytes=64 * MIB,
            disk_min_free=0,
            load="always",
            shared_memory=tmp_path,
            **{name: settings.pop(name) for name in ("codec", "compress") if name in settings},
        )
        engine = make_engine(model, offload=offload, **({"num_blocks": SMALL_POOL} | settings))
        engines.append(engine)
        if patient:
            engine._tiers._is_too_slow = lambda load: False  # however busy this machine is
        return engine

    yield make
    for engine in engines:
        engine.close()


def run(driver: Driver):
    """Until nothing is left, waiting for loads where there is nothing else to do."""
    deadline = time.monotonic() + 120
    while driver.engine.has_work() or driver.engine.stats().loading:
        if driver.engine.has_work():
            driver.step()
        assert time.monotonic() < deadline, "it does not come to an end"
    driver.assert_idle()
    return driver.seen


def patient(engine):
    """Loads are not called off, however long this machine lets them wait: what is asked is where blocks are found."""
    engine._tiers._is_too_slow = lambda load: False
    return engine


def in_turn(driver: Driver, case, name: str) -> int:
    """Every prompt, one after the other; returns how many tokens were not computed."""
    for index, (prompt, expected) in enumerate(zip(case.prompts, case.expected, strict=True)):
        driver.add(f"{name}{index}", prompt, max_tokens=GENERATED)
        seen = run(driver)[f"{name}{index}"]
        assert seen.failed is None
        assert seen.tokens[0] == expected, f"prompt {index}"
        # As if long ago: what the next one needs has to come from a tier.
        assert driver.engine.wait_for_tiers(60)
        driver.engine.clear_cache()
    return sum(driver.seen[f"{name}{index}"].started.cached_tokens for index in range(len(case.prompts)))


@pytest.mark.parametrize(
    "tiers",
    [
        {"host": True},
        {"host": False, "disk": True},
        {"host": True, "disk": True},
        {"host": False, "disk": True, "compress": True},
    ],
    ids=["host", "disk", "both", "compressed"],
)
def test_tokens_are_exact_through_every_tier_again_and_by_a_sibling_and_after_a_restart(case, tiered, tiers):
    first = patient(tiered(case.model, **tiers))
    driver = Driver(first)
    cold = in_turn(driver, case, "cold")
    warm = in_turn(driver, case, "warm")
    whole_blocks = sum((len(prompt) - 1) // 4 * 4 for prompt in case.prompts)
    assert cold < warm == whole_blocks
    sibling = Driver(patient(tiered(case.model, **tiers)))
    assert in_turn(sibling, case, "moved") == whole_blocks
    names = {name for name, blocks in sibling.engine._tiers.loaded_blocks.items() if blocks}
    assert names == {HOST if tiers.get("host") else DISK}
    sibling.engine.close()
    first.close()
    if tiers.get("disk"):
        restarted = Driver(patient(tiered(case.model, **tiers)))
        assert in_turn(restarted, case, "later") == whole_blocks
        assert restarted.engine._tiers.loaded_blocks[DISK] > 0


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_lossy_codecs_change_keys_and_values_by_no_more_than_they_say(case, tiered, codec):
    engine = tiered(case.model, codec=codec)
    driver = Driver(engine)
    prompt = random_prompt(5, 40)
    driver.add("first", prompt, max_tokens=1)
    run(driver)
    assert engine.wait_for_tiers(60)
    kv = engine._runner._kv.clone()
    engine.clear_cache()
    engine._runner._kv.zero_()
    driver.add("second", prompt, max_tokens=1)
    assert run(driver)["second"].started.cached_tokens == 36
    held = kv.abs().amax(dim=-1, keepdim=True)
    bound = held / 254 * 1.001 if codec == "int8" else torch.maximum(kv.abs() / 16, held / 448 / 1024) * 1.001
    matched = 0
    for block in engine._runner._kv:
        off = [(block - before).abs() <= limit + 1e-7 for before, limit in zip(kv, bound, strict=True)]
        matched += any(bool(within.all()) for within in off) and bool(block.any())
    assert matched >= 9


def test_a_codec_that_does_not_fit_the_kv_is_said(case, tiered):
    with pytest.raises(TierUnavailable, match="is kept as it is; use the codec raw"):
        tiered(case.model, codec="int8", kv_dtype="int8")


def test_another_model_of_the_same_name_finds_nothing(tiny_checkpoint, tiered):
    one, other = (load_model(tiny_checkpoint("llama", seed=seed), dtype=torch.float32) for seed in (0, 1))
    prompt = random_prompt(1, 40)
    for model, expected in ((one, 0), (one, 36), (other, 0), (other, 36)):
        driver = Driver(tiered(model, disk=True))
        driver.add("r", prompt, max_tokens=2)
        assert run(driver)["r"].started.cached_tokens == expected
        driver.engine.close()


def test_another_model_of_the_same_name_finds_nothing_in_redis(tiny_checkpoint, tmp_path):
    one, other = (load_model(tiny_checkpoint("llama", seed=seed), dtype=torch.float32) for seed in (0, 1))
    prompt = random_prompt(1, 40)
    with redis_server() as server:
        config = OffloadConfig(remote=server.url, remote_bytes=64 * MIB, load="always", shared_memory=tmp_path)
        for model, expected in ((one, 0), (one, 36), (other, 0), (other, 36)):
            driver = Driver(patient(make_engine(model, offload=config)))
            driver.engine._tiers._stack.tiers[0].inner.refresh()
            driver.add("r", prompt, max_tokens=2)
            assert run(driver)["r"].started.cached_tokens == expected
            assert driver.engine.wait_for_tiers(60)
            driver.engine.close()


def test_tokens_are_exact_through_redis_on_another_machine(case, tmp_path):
    with redis_server() as server:
        drivers = []
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
            config = OffloadConfig(remote=server.url, remote_bytes=64 * MIB, load="always", shared_memory=tmp_path / name)
            drivers.append(Driver(patient(make_engine(case.model, num_blocks=SMALL_POOL, offload=config))))
        here, there = drivers
        there.engine._tiers._is_too_slow = lambda load: False
        try:
            in_turn(here, case, "cold")
            there.engine._tiers._stack.tiers[0].inner.refresh()
            assert in_turn(there, case, "far") == sum((len(prompt) - 1) // 4 * 4 for prompt in case.prompts)
            assert there.engine._tiers.loaded_blocks["remote"] > 0
        finally:
            for driver in drivers:
                driver.engine.close()


class Held:
    """A tier's `load` that waits until it is let go."""

    def __init__(self, tier):
        self.entered, self.let_go = threading.Event(), threading.Event()
        self._load = tier.inner.load
        tier.inner.load = self

    def __call__(self, digest, into):
        self.entered.set()
        self.let_go.wait(60)
        return self._load(digest, into)


def test_a_request_that_loads_keeps_nobody_waiting_and_can_be_aborted_at_once(case, tiered):
    engine = tiered(case.model, host=False, disk=True, num_blocks=128)
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    held = Held(engine._tiers._stack.tiers[0])
    driver.add("loads", case.prompts[6], max_tokens=GENERATED)
    driver.step()
    assert held.entered.wait(60)
    assert engine.stats().loading == 1
    assert not engine.has_work()
    before = engine.stats()
    driver.add("other", random_prompt(50, 9), max_tokens=4)
    while driver.seen["other"].done is None:
        driver.step()
    assert driver.seen["loads"].started is None
    assert engine.abort("loads")
    engine.check_integrity()
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert stats.free_blocks > before.free_blocks
    # The blocks are somebody else's while the thread is still in its read; it must not write to them.
    driver.add("next", case.prompts[5], max_tokens=GENERATED)
    driver.step()
    held.let_go.set()
    assert run(driver)["next"].tokens[0] == case.expected[5]
    assert driver.seen["loads"].done is None


def test_who_waits_longer_than_computing_takes_computes(case, tiered):
    engine = tiered(case.model, host=False, disk=True, num_blocks=128, patient=False)
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    held = Held(engine._tiers._stack.tiers[0])
    driver.add("impatient", case.prompts[6], max_tokens=GENERATED)
    seen = run(driver)["impatient"]
    assert not held.let_go.is_set()
    assert seen.tokens[0] == case.expected[6]
    assert seen.started.cached_tokens == 0
    assert engine._tiers.abandoned_loads == 1
    held.let_go.set()


def test_damage_in_the_middle_of_a_prompt_costs_what_follows_and_no_token(case, tiered):
    engine = tiered(case.model, num_blocks=128)
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    arena = engine._tiers._stack.tiers[0].inner
    digests = engine.prepare(wire("names", case.prompts[6])).sequences[0].digests
    arena.slot(arena.table.find(digests[7]))[11] ^= 8
    driver.add("damaged", case.prompts[6], max_tokens=GENERATED)
    seen = run(driver)["damaged"]
    assert seen.tokens[0] == case.expected[6]
    assert seen.started.cached_tokens == 7 * 4
    assert arena.figures().healed == 1
    engine.wait_for_tiers(60)
    engine.clear_cache()
    driver.add("healed", case.prompts[6], max_tokens=GENERATED)
    assert run(driver)["healed"].started.cached_tokens == 15 * 4


def test_a_directory_that_cannot_be_used_costs_the_tier_and_is_said(case, tmp_path, caplog):
    (tmp_path / "file").write_text("no directory")
    config = OffloadConfig(disk=tmp_path / "file", shared_memory=tmp_path)
    driver = Driver(make_engine(case.model, offload=config))
    driver.add("r", case.prompts[4], max_tokens=GENERATED)
    assert run(driver)["r"].tokens[0] == case.expected[4]
    assert "no disk tier for now: " in caplog.text
    assert "cannot be used: Not a directory." in caplog.text
    driver.engine.close()


@pytest.mark.parametrize("failing", ["load", "store", "prefix", "mark"])
def test_a_tier_that_fails_is_left_alone_and_serving_goes_on(case, tiered, failing, caplog):
    engine = tiered(case.model, host=False, disk=True)
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    tier = engine._tiers._stack.tiers[0]
    tier._clock = lambda: 0.0  # it is never tried again, however long this takes

    def fail(*args, **settings):
        raise OSError(5, "Input/output error")

    setattr(tier.inner, failing, fail)
    if failing == "store":
        tier.inner.table.clear()
    in_turn(driver, case, "failing")
    assert tier.errors > 0
    assert not tier.is_available
    assert re.search(
        r"(reading from|writing to) the disk tier is left alone for 1 s: \[Errno 5\] Input/output error", caplog.text
    )


def test_a_directory_that_is_removed_costs_what_was_in_it_and_is_made_anew(case, tiered, tmp_path, caplog):
    engine = patient(tiered(case.model, host=False, disk=True))
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    tier = engine._tiers._stack.tiers[0]
    shutil.rmtree(tmp_path / "disk")
    tier.inner.inner._checked = float("-inf")
    # Still open: what was there can be read, and what is new is lost once.
    driver.add("new", random_prompt(77, 40), max_tokens=2)
    run(driver)
    assert engine.wait_for_tiers(60)
    assert tier.errors == 1
    assert "was removed; what lay there is lost, and it begins anew." in caplog.text
    in_turn(driver, case, "without")
    now = time.monotonic() + 100
    tier._clock = lambda: now
    in_turn(driver, case, "anew")
    assert (tier.inner.inner.place / "data").exists()
    whole_blocks = sum((len(prompt) - 1) // 4 * 4 for prompt in case.prompts)
    assert in_turn(driver, case, "again") == whole_blocks
    assert tier.errors == 1


def test_the_world_is_told_what_the_tiers_hold(case, tiered):
    engine = tiered(case.model, disk=True)
    sibling = tiered(case.model, disk=True)
    driver = Driver(engine)
    in_turn(driver, case, "cold")
    told = {HOST: set(), DISK: set(), DEVICE: set()}
    deadline = time.monotonic() + 60

    def listen(to) -> None:
        for event in to.take_events():
            if isinstance(event, BlocksStored):
                told[event.tier] |= set(split_digests(event.digests))
            elif isinstance(event, BlocksRemoved):
                told[event.tier] -= set(split_digests(event.digests))

    host, disk = (tier.inner for tier in engine._tiers._stack.tiers)
    for listener in (engine, sibling):
        for tier in told.values():
            tier.clear()
        while True:
            listen(listener)
            there = [{place.digest for place in tier.table.places()} for tier in (host, disk)]
            if [told[HOST], told[DISK]] == there and there[0]:
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        snapshot = listener.snapshot()
        assert [set(split_digests(snapshot[tier])) for tier in (HOST, DISK)] == there
    host.evict(list(told[HOST])[:5])
    while told[HOST] != {place.digest for place in host.table.places()}:
        listen(sibling)
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_and_aborts_lose_no_block_and_no_token(case, tiered, seed):
    """A pool that two requests fill, five at a time, some dropped at a random moment, slots damaged meanwhile."""
    chance = random.Random(seed)
    engine = tiered(case.model, disk=True, num_blocks=30 + 4 * seed, max_num_seqs=4)
    driver = Driver(engine)
    arena = engine._tiers._stack.tiers[0].inner
    asked: dict[str, int] = {}
    running: dict[str, int] = {}
    for number in range(70):
        name = f"r{number}"
        index = chance.randrange(len(case.prompts))
        driver.add(name, case.prompts[index], max_tokens=GENERATED, priority=chance.randrange(2))
        running[name] = asked[name] = index
        for _ in range(chance.randrange(12)):
            if engine.has_work():
                driver.step()
            if chance.random() < 0.05 and running:
                gone = chance.choice(sorted(running))
                if engine.abort(gone):
                    engine.check_integrity()
                    del running[gone]
        if chance.random() < 0.1:
            engine.clear_cache()
        if chance.random() < 0.2 and (places := arena.table.places()):
            arena.slot(chance.choice(places))[chance.randrange(64)] ^= 1
        running = {name: index for name, index in running.items() if driver.seen[name].done is None}
    run(driver)
    checked = 0
    for number in range(70):
        seen = driver.seen[f"r{number}"]
        assert seen.failed is None
        if seen.done is not None:
            assert seen.tokens[0] == case.expected[asked[f"r{number}"]]
            checked += 1
    assert checked > 20
    assert sum(engine._tiers.loaded_blocks.values()) > 20
    assert engine.wait_for_tiers(60)
    for tier in engine._tiers._stack.tiers:
        tier.check_integrity()
