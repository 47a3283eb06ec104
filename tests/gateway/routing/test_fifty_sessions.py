"""The dispatcher over real `turnkeep engine --simulate` processes."""

import asyncio
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.router.config import RouterConfig
from gateway.supervision.config import SupervisorConfig
from gateway.supervision.supervisor import Supervisor
from gateway.turn import Prompt, SessionRef, TurnError
from gateway.workers.protocol import Done, SamplingParams, Tokens
from prefix_cache.hashing import block_digests, pack_tokens, root_digest
from prefix_cache.packed_tokens import PackedTokens

REPLICAS = 3
SESSIONS = 50
TURNS = 6


@pytest.fixture
async def cluster():
    """Starts replicas and a dispatcher over them: cluster(router, replicas) -> (dispatcher, supervisor, ups)."""
    stacks = []

    async def start(router=None, replicas=REPLICAS, options=()):
        directory = tempfile.TemporaryDirectory(prefix="tk-")
        dispatcher = PoolDispatcher(PoolConfig(poll_interval=0.1, router=router or RouterConfig()))
        ups = {}

        def command_for(number, socket, threads):
            code = "from cli.main import main; main()"
            return [
                *(sys.executable, "-c", code, "engine", "--simulate", "--uds", str(socket)),
                *("--max-model-len", "40000", "--num-blocks", "40000", "--log-level", "warning", "--debug-integrity"),
                *options,
            ]

        def on_up(up):
            ups[up.name] = up
            dispatcher.add_worker(up.name, up.url)

        supervisor = Supervisor(
            SupervisorConfig(replicas=replicas, pin_cores=False, runtime_dir=Path(directory.name), backoff_first=0.1),
            command_for,
            on_up=on_up,
            on_down=dispatcher.remove_worker,
        )
        stacks.append((directory, dispatcher, supervisor))
        await supervisor.__aenter__()
        await supervisor.ready()
        await dispatcher.wait_ready(replicas, 20)
        return dispatcher, supervisor, ups

    yield start
    for directory, dispatcher, supervisor in stacks:
        await dispatcher.__aexit__(None, None, None)
        await supervisor.__aexit__(None, None, None)
        directory.cleanup()


async def turn(dispatcher, session, history, turn_id, max_tokens=8):
    """One turn: (receipt, tokens, done)."""
    info = dispatcher.pool_info("simulated")
    root = root_digest(bytes.fromhex(info.namespace))
    generation = await dispatcher.dispatch(
        request_id=f"{session}-{turn_id}",
        model="simulated",
        session=SessionRef("", session),
        prompt=Prompt(PackedTokens(pack_tokens(history)), tuple(block_digests(history, root, info.block_size))),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        priority=0,
        trace_headers={},
    )
    made = []
    done = None
    try:
        async for chunk in generation.chunks():
            if isinstance(chunk, Tokens):
                made.extend(chunk.token_ids)
            elif isinstance(chunk, Done):
                done = chunk
    finally:
        await generation.aclose()
    return generation.receipt, made, done


async def converse(dispatcher, number, system, outcome, turns=TURNS, own=1200):
    """A session of its own pace: its history grows by what was generated and by a tool's result."""
    rng = random.Random(number)
    await asyncio.sleep(number * 0.01)
    history = system + [rng.randrange(40_000) for _ in range(own)]
    for position in range(turns):
        receipt, made, done = await turn(dispatcher, f"s{number}", history, position)
        outcome.append((number, position, receipt, done, len(history)))
        assert len(made) == 8
        history = history + made + [rng.randrange(40_000) for _ in range(150)]
        await asyncio.sleep(rng.random() * 0.02)


async def stats(up):
    connector = aiohttp.UnixConnector(up.url.removeprefix("unix:"))
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get("http://w/v1/stats") as response:
            return await response.json()


async def test_fifty_sessions_keep_their_prefix_and_leave_nothing_behind(cluster):
    # Home weighs so much that no queue outweighs it: on a machine that starves its processes real queues get long
    # enough to move a session, and rightly so.
    dispatcher, _, ups = await cluster(RouterConfig(hysteresis=20.0), options=("--sim-time-scale", "0.25"))
    system = [random.Random(99).randrange(40_000) for _ in range(160)]
    outcome = []
    await asyncio.gather(*(converse(dispatcher, number, system, outcome) for number in range(SESSIONS)))
    assert len(outcome) == SESSIONS * TURNS
    homes = {number: receipt.worker for number, position, receipt, _, _ in outcome if position == 0}
    for number, position, receipt, done, length in outcome:
        if position:
            assert receipt.worker == homes[number]
            # All of the session's earlier turns but a started block, and the index knew it.
            assert done.cached_tokens >= length - 150 - 8 - 16
            assert abs(receipt.matched_tokens - done.cached_tokens) <= 32
    prompt = sum(length for *_, length in outcome)
    cached = sum(done.cached_tokens for *_, done, _ in outcome)
    # One cache without limits computes the system prompt once, and of each session every token once.
    ideal = prompt - len(system) - SESSIONS * (1200 + (TURNS - 1) * (150 + 8))
    assert cached / ideal >= 0.97
    sessions = [list(homes.values()).count(name) for name in ups]
    assert min(sessions) >= SESSIONS / REPLICAS * 0.4
    for view in dispatcher.workers():
        assert (view.in_flight, view.queued_tokens) == (0, 0)
    for up in ups.values():
        # Under --debug-integrity the replica would have ended had its own books not balanced.
        said = await stats(up)
        assert (said["running"], said["waiting"]) == (0, 0)
        assert said["free_blocks"] + said["cached_blocks"] == said["num_blocks"]
        async with asyncio.timeout(5):
            while dispatcher.index.blocks(up.name) != said["cached_blocks"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_round_robin_finds_less_on_the_same_sessions(cluster):
    shares = {}
    for policy in ("round_robin", "prefix"):
        dispatcher, _, _ = await cluster(RouterConfig(policy=policy), 2)
        outcome = []
        await asyncio.gather(*(converse(dispatcher, number, [], outcome, turns=4, own=200) for number in range(8)))
        shares[policy] = sum(done.cached_tokens for *_, done, _ in outcome) / sum(length for *_, length in outcome)
        await dispatcher.__aexit__(None, None, None)
    assert shares["prefix"] > shares["round_robin"] + 0.1


async def test_sessions_go_on_when_a_replica_is_killed(cluster):
    dispatcher, _, ups = await cluster(replicas=2, options=("--sim-decode-sequence", "0.004"))
    served, errors = 0, []

    async def one(number):
        nonlocal served
        rng = random.Random(number)
        history = [rng.randrange(40_000) for _ in range(400)]
        for position in range(8):
            try:
                _, made, _ = await turn(dispatcher, f"s{number}", history, position)
            except TurnError as error:
                errors.append((error.status, error.retry_after is not None))
                await asyncio.sleep(0.05)
                continue
            served += 1
            history = history + made

    async def kill():
        await asyncio.sleep(0.15)
        os.kill(ups["replica-0"].pid, signal.SIGKILL)

    await asyncio.gather(kill(), *(one(number) for number in range(12)))
    assert served + len(errors) == 12 * 8
    # Only turns that had begun to answer on the killed replica may be lost, one for each session at most.
    assert len(errors) <= 12
    assert set(errors) <= {(502, True), (503, True)}
    assert served >= 12 * 7
    await dispatcher.wait_ready(2, 20)
    for view in dispatcher.workers():
        assert (view.state, view.in_flight, view.queued_tokens) == ("ready", 0, 0)
    # The one that came back has done nothing lately: that is where new sessions go.
    receipts = {(await turn(dispatcher, f"new{number}", [number] * 40, 0))[0].worker for number in range(6)}
    assert "replica-0" in receipts


async def test_leaving_in_prefill_frees_the_replica_at_once(cluster):
    dispatcher, _, ups = await cluster(
        replicas=1, options=("--sim-prefill-token", "0.01", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    )
    task = asyncio.create_task(turn(dispatcher, "s", list(range(4000)), 0))
    up = ups["replica-0"]
    async with asyncio.timeout(5):
        while (await stats(up))["running"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    began = asyncio.get_running_loop().time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        while (await stats(up))["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began < 1.5
    assert dispatcher.workers()[0].in_flight == 0
