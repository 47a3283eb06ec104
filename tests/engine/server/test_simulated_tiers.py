"""Simulated replicas with tiers: what a real one would hold, give up, load and tell, in made-up seconds."""

import random
from collections import defaultdict

import pytest

from engine.config import ConfigError
from engine.simulate import SimulatedEngine
from engine.simulation.clock import VirtualClock
from engine.simulation.config import CostModel, SimulationConfig
from gateway.workers.protocol import Done, GenerateRequest, RetentionHint, SamplingParams, Started, Tokens
from offload.config import OffloadConfig
from prefix_cache.events import DEVICE, DISK, HOST, BlocksRemoved, BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import split_digests
from prefix_cache.index import ResidencyIndex

TOKEN_BYTES = 1000
BLOCK = 16
BLOCK_BYTES = TOKEN_BYTES * BLOCK
RATES = {"kv_token_bytes": TOKEN_BYTES, "host_rate": 16e6, "disk_rate": 1.6e6}
"""A millisecond a block from host memory, ten from disk."""
COST = CostModel(step=0.001, prefill_token=0.001, prefill_pair=0.0, decode_sequence=0.0001, decode_context_token=0.0)
"""16 milliseconds to compute a block."""


@pytest.fixture
def simulated(tmp_path):
    engines = []

    def make(*, host=1000, disk=0, blocks=32, load="always", clock=None, **settings):
        offload = OffloadConfig(
            host_bytes=host * BLOCK_BYTES,
            disk=tmp_path / "disk" if disk else None,
            disk_bytes=disk * BLOCK_BYTES,
            disk_min_free=0,
            load=load,
            shared_memory=tmp_path,
        )
        config = SimulationConfig(
            num_blocks=blocks,
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            mean_output_tokens=0,
            cost=COST,
            offload=offload,
            **{**RATES, **settings},
        )
        engines.append(SimulatedEngine(config, clock=clock or VirtualClock()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(number, length=321):
    chance = random.Random(number)
    return [chance.randrange(3, 40_000) for _ in range(length)]


def add(core, request_id, ids, session=None, **sampling):
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling})
    wire = GenerateRequest(request_id=request_id, token_ids=ids, sampling=sampling, tenant="t", session=session)
    core.add(core.prepare(wire))


def run(core, chunks=None):
    """Until nothing is left; the chunks by request, and the events of it all."""
    chunks = defaultdict(list) if chunks is None else chunks
    events = []
    for _ in range(10_000):
        if not core.has_work():
            return chunks, events
        for request_id, chunk in core.step():
            chunks[request_id].append(chunk)
        events += core.take_events()
        core.check_integrity()
    raise AssertionError("it never became idle")


def ask(core, request_id, ids, **settings):
    """(tokens cached, seconds to the first token, tokens generated)."""
    began = core._clock.now()
    add(core, request_id, ids, **settings)
    chunks = run(core)[0][request_id]
    started, done = chunks[0], chunks[-1]
    assert isinstance(started, Started)
    assert isinstance(done, Done)
    tokens = [token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.token_ids]
    return started.cached_tokens, core._clock.now() - began - done.decode_seconds, tokens


def hint(session, state="waiting", **settings):
    return RetentionHint(tenant="t", session=session, request_id="any", state=state, **settings)


def crowd_out(core, *numbers):
    for number in numbers:
        ask(core, f"other{number}", prompt(number))


def tier(core, name):
    return next(each for each in core.stats().tiers if each.name == name)


def test_what_the_pool_gave_up_is_loaded_in_the_time_its_bytes_take(simulated):
    core = simulated()
    assert ask(core, "cold", prompt(1))[:2] == (0, pytest.approx(321 * 0.001 + 2 * 0.001))
    crowd_out(core, 2, 3)
    cached, seconds, tokens = ask(core, "warm", prompt(1))
    assert cached == 320
    # Twenty blocks of a millisecond each, then one token in one step.
    assert seconds == pytest.approx(0.020 + 0.002)
    assert tokens == ask(simulated(host=0), "alone", prompt(1))[2]
    host = tier(core, HOST)
    assert (host.hit_tokens_total, host.used_bytes, host.max_bytes) == (320, 60 * BLOCK_BYTES, 1000 * BLOCK_BYTES)
    assert host.seconds_per_block == pytest.approx(0.001)


def test_disk_takes_longer_and_outlives_the_replica(simulated):
    core = simulated(host=0, disk=500)
    ask(core, "cold", prompt(1))
    core.close()
    again = simulated(host=0, disk=500)
    cached, seconds, _ = ask(again, "warm", prompt(1))
    assert (cached, seconds) == (320, pytest.approx(0.200 + 0.002))
    assert tier(again, DISK).hit_tokens_total == 320


def test_what_takes_longer_to_load_than_to_compute_is_computed(simulated):
    core = simulated(host=0, disk=500, load="faster", disk_rate=0.1e6)
    ask(core, "cold", prompt(1))
    crowd_out(core, 2, 3)
    assert ask(core, "warm", prompt(1))[0] == 0


def test_a_sibling_has_it_too_and_tells(simulated):
    one, other = simulated(disk=500), simulated(disk=500)
    ask(one, "here", prompt(1))
    told = {DEVICE: set(), HOST: set(), DISK: set()}
    for event in other.take_events():
        (told[event.tier].update if isinstance(event, BlocksStored) else told[event.tier].difference_update)(
            split_digests(event.digests)
        )
    assert not told[DEVICE]
    assert len(told[HOST]) == len(told[DISK]) == 20
    assert {name: len(joined) // 16 for name, joined in other.snapshot().items()} == {HOST: 20, DISK: 20}
    assert ask(other, "there", prompt(1))[0] == 320


def test_a_gateways_index_knows_who_has_what_in_which_tier(simulated):
    one, other = simulated(host=30, disk=500), simulated(host=30, disk=500)
    index = ResidencyIndex()
    seq = defaultdict(int)

    def listen():
        for name, core in (("one", one), ("other", other)):
            seq[name] += 1
            index.apply(name, EventBatch(core.info.instance, seq[name], tuple(core.take_events())))

    for name, core in (("one", one), ("other", other)):
        index.apply(name, Snapshot(core.info.instance, 0, core.snapshot()))
    wire = GenerateRequest(request_id="names", token_ids=prompt(1), sampling=SamplingParams(max_tokens=4), tenant="t")
    digests = one.prepare(wire).digests
    for number in (1, 2):
        add(one, f"r{number}", prompt(number))
        while one.has_work():
            one.step()
            listen()
    listen()
    found, lower = index.lookup_tiers(digests)
    assert found == {"one": 20, "other": 20}

    assert (lower["other"].device, lower["other"].remote) == (0, 0)
    assert lower["other"].host + lower["other"].disk == 20
    assert lower["other"].disk >= 10, "of the first prompt's blocks memory has given up those that the second took"
    assert lower["one"].device > 0


def test_the_bounds_hold_and_what_goes_is_told(simulated):
    core = simulated(host=30, blocks=64)
    events = []
    for number in range(5):
        add(core, f"r{number}", prompt(number))
        events += run(core)[1]
    assert tier(core, HOST).blocks == 30
    held = set()
    for event in events:
        if event.tier == HOST:
            (held.difference_update if isinstance(event, BlocksRemoved) else held.update)(split_digests(event.digests))
    assert len(held) == 30
    assert tier(core, HOST).evicted_blocks_total == 5 * 20 - 30


def test_others_run_while_one_loads_and_an_abort_gives_all_back(simulated):
    core = simulated(host=0, disk=500, blocks=64)
    ask(core, "cold", prompt(1))
    crowd_out(core, 2, 3, 4)
    add(core, "loads", prompt(1))
    add(core, "runs", prompt(9, 33), max_tokens=3)
    chunks = defaultdict(list)
    while not chunks["runs"] or not isinstance(chunks["runs"][-1], Done):
        for request_id, chunk in core.step():
            chunks[request_id].append(chunk)
        core.check_integrity()
        if core.stats().loading:
            assert not chunks["loads"]
    assert core.stats().loading == 1
    assert core.abort("loads")
    core.check_integrity()
    run(core)
    stats = core.stats()
    assert (stats.loading, stats.free_blocks + stats.cached_blocks) == (0, 64)


def test_hints_keep_release_and_fetch(simulated):
    clock = VirtualClock(1000.0)
    core = simulated(host=42, disk=500, clock=clock)
    ask(core, "pinned", prompt(1), session="pinned")
    ask(core, "idle", prompt(2), session="idle")
    core.retain([hint("pinned", ttl=600.0)])
    crowd_out(core, 3, 4, 5)
    assert ask(core, "kept", prompt(1))[0] == 320
    before = tier(core, DISK).hit_tokens_total
    assert before == 0, "a pinned session stays in memory"
    ask(core, "lost", prompt(2), session="idle")
    assert tier(core, DISK).hit_tokens_total == 320, "an idle one had to come from disk"
    core.retain([hint("idle", return_p50=8.0, return_p90=20.0), hint("pinned", state="closed")])
    crowd_out(core, 6, 7, 8)
    assert core.stats().prefetched_blocks_total == 0
    clock.wait_until(clock.now() + 4.0)
    assert core.has_work()
    core.step()
    clock.wait_until(clock.now() + 1.0)
    run(core)
    fetched = core.stats().prefetched_blocks_total
    assert fetched + tier(core, DISK).hit_tokens_total // BLOCK >= 20
    assert core.stats().lost_blocks_total == 0


def test_sessions_that_nothing_has_any_more_are_counted_lost(simulated):
    core = simulated(host=20)
    ask(core, "first", prompt(1), session="s")
    crowd_out(core, 2, 3, 4)
    assert ask(core, "again", prompt(1), session="s")[0] == 0
    assert core.stats().lost_blocks_total == 20


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_and_aborts_change_no_token_and_lose_no_block(simulated, seed):
    chance = random.Random(seed)
    core, plain = (
        simulated(host=60, disk=100, blocks=40),
        SimulatedEngine(SimulationConfig(mean_output_tokens=0), clock=VirtualClock()),
    )
    expected = {}
    for number in range(6):
        add(plain, f"{number}", prompt(number), max_tokens=20)
        chunks, _ = run(plain)
        expected[number] = [token for chunk in chunks[f"{number}"] if isinstance(chunk, Tokens) for token in chunk.token_ids]
    asked, gone = {}, set()
    chunks = defaultdict(list)
    for turn in range(60):
        number = chance.randrange(6)
        asked[f"r{turn}"] = number
        add(core, f"r{turn}", prompt(number), session=f"s{number}", max_tokens=20)
        for _ in range(chance.randrange(30)):
            for request_id, chunk in core.step():
                chunks[request_id].append(chunk)
        if chance.random() < 0.2:
            name = chance.choice(sorted(asked))
            if core.abort(name):
                gone.add(name)
        core.check_integrity()
    run(core, chunks)
    for name, number in asked.items():
        if name not in gone:
            tokens = [token for chunk in chunks[name] if isinstance(chunk, Tokens) for token in chunk.token_ids]
            assert tokens == expected[number]
    assert len(gone) < 30
    assert sum(each.hit_tokens_total for each in core.stats().tiers) > 1000
    stats = core.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    for each in core._tiers._tiers:
        each.check_integrity()


@pytest.mark.parametrize(("name", "value"), [("kv_token_bytes", 0), ("host_rate", 0.0), ("disk_rate", float("nan"))])
def test_sizes_and_rates_that_are_none_are_said(name, value):
    with pytest.raises(ConfigError, match=name):
        SimulationConfig(**{name: value})


def test_a_tier_without_room_for_a_block_is_left_out_and_said(simulated, caplog):
    core = simulated(kv_token_bytes=10**9)
    assert (
        "no host tier: The host tier has 16000000 bytes, but one simulated block takes 16000000000; give it more."
        in caplog.text
    )
    assert core.stats().tiers == ()
    assert ask(core, "r", prompt(1))[0] == 0
