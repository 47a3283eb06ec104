"""Sessions at the door of a real engine: who waits, who pauses, that nothing of it changes a token, and what it is worth."""

import asyncio
import time

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine, random_prompt, wire
from virtual_sessions import growing_sessions

from engine.bench.offload.virtual import VirtualClock, replay_virtually, virtual_config
from engine.bench.offload.virtual_tiers import VirtualTiers
from engine.bench.offload.workload import largest, working_set
from engine.models.registry import load_model
from engine.session_door import DoorConfig
from engine.thread import EngineThread
from gateway.workers.protocol import RetentionHint
from offload.config import OffloadConfig
from prefix_cache.eviction import LRUPolicy


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("llama"), dtype=torch.float32)


def make(model, **settings):
    """An engine for which no time passes, unless a clock is given."""
    door = DoorConfig(**{name: settings.pop(name) for name in ("low", "high", "overtakes", "patience") if name in settings})
    return Driver(make_engine(model, policy="sessions", door=door, **{"num_blocks": 32, "clock": VirtualClock(), **settings}))


def add(driver, name, session, prompt, **settings):
    request = wire(name, prompt, **{"max_tokens": 2, **settings})
    driver.engine.add(driver.engine.prepare(msgspec.structs.replace(request, session=session, tenant="t")))
    driver.engine.check_integrity()


def hint(session, **settings):
    return RetentionHint(session=session, tenant="t", request_id="r", **settings)


def drive(driver):
    while driver.engine.has_work():
        driver.step()


def figures(driver):
    stats = driver.engine.stats()
    return stats.held, stats.sessions_in_progress, stats.sessions_paused


def test_a_new_session_waits_until_one_in_progress_is_closed(model):
    driver = make(model, low=0.8)
    for name in ("a", "b"):
        add(driver, name, name, random_prompt(ord(name), 48))
        drive(driver)
    add(driver, "c", "c", random_prompt(3, 40))
    add(driver, "free", None, random_prompt(4, 20))
    drive(driver)
    assert driver.seen["free"].done is not None, "who has no session does not wait"
    assert driver.seen["c"].started is None
    assert figures(driver) == (1, 2, 0)
    stats = driver.engine.stats()
    assert (stats.waiting, stats.waiting_prompt_tokens, stats.held_total) == (1, 40, 1)
    assert driver.engine.wakes_in() > 0
    driver.engine.retain([hint("a", state="closed")])
    drive(driver)
    assert driver.seen["c"].done is not None
    assert figures(driver) == (0, 2, 0)
    driver.assert_idle()


def test_who_leaves_at_the_door_is_gone_and_who_is_drained_need_not_wait(model):
    driver = make(model, low=0.8)
    for name in ("a", "b"):
        add(driver, name, name, random_prompt(ord(name), 48))
        drive(driver)
    for name in ("c", "d"):
        add(driver, name, name, random_prompt(ord(name), 40))
    drive(driver)
    assert figures(driver)[0] == 2
    assert driver.engine.abort("c")
    assert not driver.engine.abort("c")
    assert figures(driver)[0] == 1
    driver.engine.drain()
    drive(driver)
    assert driver.seen["d"].done is not None
    assert driver.seen["c"].started is None
    driver.assert_idle()


def test_the_cheapest_session_pauses_and_goes_on_when_there_is_room(model):
    driver = make(model, low=0.8)
    prompts = {name: random_prompt(ord(name), 100) for name in "abc"}
    for name, length in (("a", 40), ("b", 20), ("c", 28)):
        add(driver, f"{name}1", name, prompts[name][:length])
        drive(driver)
    add(driver, "a2", "a", prompts["a"][:84])
    drive(driver)
    assert figures(driver) == (0, 2, 1), "b pauses: 21 and 7 blocks are left"
    add(driver, "b2", "b", prompts["b"][:30])
    drive(driver)
    assert driver.seen["b2"].started is None
    assert figures(driver) == (1, 2, 1)
    driver.engine.retain([hint("b", return_p50=1.0, return_p90=2.0), hint("a", state="closed")])
    drive(driver)
    assert driver.seen["b2"].done is not None
    assert figures(driver) == (0, 2, 0)
    assert driver.engine.stats().pauses_total == 1


@pytest.mark.parametrize("crowded", [False, True])
def test_turns_of_sessions_that_began_earlier_go_first_while_somebody_waits(model, crowded):
    driver = make(model, low=0.8, max_num_seqs=1, num_blocks=64)
    for name in "ab":
        add(driver, f"{name}1", name, random_prompt(ord(name), 32))
        drive(driver)
    if crowded:
        add(driver, "c1", "c", random_prompt(3, 200))
        driver.step()
        assert figures(driver)[0] == 1
    add(driver, "free", None, random_prompt(9, 8), max_tokens=6)
    driver.step()
    for name in "ba":
        add(driver, f"{name}2", name, random_prompt(ord(name), 40))
    ended = []
    while driver.engine.has_work():
        ended += [name for name, chunk in driver.step() if type(chunk).__name__ == "Done"]
    assert ended == (["free", "a2", "b2"] if crowded else ["free", "b2", "a2"])


def test_a_turn_in_the_queue_goes_back_to_the_door_and_comes_again(model):
    driver = make(model, low=1.0, max_num_seqs=1)
    prompts = {name: random_prompt(ord(name), 110) for name in "abc"}
    for name in "abc":
        add(driver, f"{name}1", name, prompts[name][:36])
        drive(driver)
    add(driver, "a2", "a", prompts["a"][:60], max_tokens=6)
    driver.step()
    add(driver, "b2", "b", prompts["b"][:40])
    add(driver, "a3", "a", prompts["a"][:90])
    driver.step()
    assert figures(driver)[2] >= 1
    assert driver.engine.abort("a2")
    driver.engine.retain([hint("a", state="closed")])
    drive(driver)
    assert driver.seen["b2"].done is not None
    assert driver.seen["a3"].done is not None
    driver.assert_idle()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_same_as_with_a_pool_for_all(model, seed):
    generator = np.random.default_rng(seed)
    turns = {}
    for session in range(5):
        prompt = random_prompt(100 * seed + session, 90)
        turns[f"s{session}"] = [prompt[: int(end)] for end in np.sort(generator.integers(8, 90, 4))]
    wide = Driver(make_engine(model, num_blocks=512))
    narrow = make(model, num_blocks=40, overtakes=3, patience=0.05, clock=time.monotonic)
    for session, prompts in turns.items():
        for number, prompt in enumerate(prompts):
            add(wide, f"{session}-{number}", None, prompt, max_tokens=4)
    wide.run()
    left = [(session, number) for number in range(4) for session in turns]
    sent, dropped = {}, set()
    for _ in range(100_000):
        if not left and not sent:
            break
        ready = [one for one in left if one[0] not in sent]
        if ready and generator.random() < 0.3:
            session, number = ready[0]
            left.remove(ready[0])
            sent[session] = f"{session}-{number}"
            add(narrow, sent[session], session, turns[session][number], max_tokens=4)
        if sent and generator.random() < 0.02:
            session = str(generator.choice(sorted(sent)))
            dropped.add(sent[session])
            narrow.engine.abort(sent.pop(session))
        for name, chunk in narrow.step() if narrow.engine.has_work() else ():
            if type(chunk).__name__ == "Done":
                session = name.split("-")[0]
                del sent[session]
                is_last = name.endswith("3")
                narrow.engine.retain(
                    [hint(session, **({"state": "closed"} if is_last else {"return_p50": 0.01, "return_p90": 0.02}))]
                )
    assert not left
    assert not sent
    for name, seen in wide.seen.items():
        if name not in dropped:
            assert narrow.seen[name].tokens == seen.tokens
    narrow.assert_idle()


async def test_sessions_that_never_come_back_make_room_without_anybody_doing_anything(model):
    engine = make_engine(model, num_blocks=32, policy="sessions", door=DoorConfig(low=0.8, patience=0.3))
    thread = EngineThread(engine)
    await thread.start()
    try:

        async def turn(name, length):
            request = msgspec.structs.replace(wire(name, random_prompt(ord(name), length), max_tokens=2), session=name)
            stream = await thread.submit(request)
            while await stream.read():
                pass
            return stream.end

        for name in ("a", "b"):
            await turn(name, 48)
        async with asyncio.timeout(60):
            assert await turn("c", 48) is not None
    finally:
        await thread.close()


def test_replicas_that_share_a_tier_have_their_share_of_its_room(model, tmp_path):
    def tiered(**settings):
        offload = OffloadConfig(host_bytes=4 << 20, shared_memory=tmp_path, **settings)
        return make_engine(model, num_blocks=16, policy="sessions", offload=offload, clock=clock)

    clock = VirtualClock()
    first = tiered()
    whole = first._capacity()
    assert whole > 500
    others = [tiered(), tiered()]
    clock.now += 2.0
    assert [engine._capacity() for engine in (first, *others)] == [whole // 3] * 3
    for engine in others:
        engine.close()
    clock.now += 2.0
    assert first._capacity() == whole
    first._tiers._stack.tiers[0]._reading.until = float("inf")
    assert first._capacity() == 16, "a tier that is out of use holds nothing"
    first.close()


def test_more_sessions_than_the_device_holds_go_in_where_the_tier_holds_them(model, tmp_path):
    offload = OffloadConfig(host_bytes=4 << 20, shared_memory=tmp_path, load="always")
    driver = make(model, num_blocks=32, offload=offload)
    for name in "abcdef":
        add(driver, name, name, random_prompt(ord(name), 100))
        while driver.engine.has_work() or driver.engine.stats().loading:
            driver.step()
        assert driver.seen[name].done is not None
    assert figures(driver) == (0, 6, 0)
    driver.engine.close()


SHAPE = {"shared": 400, "first": 600, "growth": 500, "gap": 3.0, "begin_within": 3.0}


def side(smallest, sessions, blocks, *, ours, host=0):
    outcome, engine = replay_virtually(
        smallest,
        sessions,
        3.0,
        virtual_config(policy="sessions" if ours else "fcfs", max_draft_tokens=0),
        blocks=blocks,
        hints=ours,
        eviction=None if ours else LRUPolicy(),
        make_tiers=(lambda clock: VirtualTiers(clock, max_blocks=host)) if ours and host else None,
    )
    engine.check_integrity()
    return outcome


@pytest.mark.parametrize(("share", "with_tier"), [(1.0, False), (0.25, True), (0.125, True)])
def test_with_twice_as_many_sessions_as_fit_each_takes_half_as_long(smallest, share, with_tier):
    """On a virtual clock, so that nothing depends on the machine. The pool, or a host tier, holds half of the sessions."""
    sessions = growing_sessions(24, 1, **SHAPE)
    half = working_set(sessions, 16) // 2
    blocks = max(int(share * half), largest(sessions, 16))
    ours = side(smallest, sessions, blocks, ours=True, host=half if with_tier else 0)
    plain = side(smallest, sessions, blocks, ours=False)
    assert len(ours.completions) == len(plain.completions) == 24
    assert ours.rate > plain.rate
    assert ours.completion(0.95) < plain.completion(0.95)
    assert plain.mean_completion > 2 * ours.mean_completion


def test_where_all_sessions_fit_nobody_waits_and_nothing_is_lost(smallest):
    sessions = growing_sessions(12, 7, **SHAPE)
    blocks = working_set(sessions, 16) * 3 // 2 + largest(sessions, 16)
    ours, plain = (side(smallest, sessions, blocks, ours=each) for each in (True, False))
    assert ours.cached_tokens == plain.cached_tokens
    assert ours.mean_completion < 1.02 * plain.mean_completion
