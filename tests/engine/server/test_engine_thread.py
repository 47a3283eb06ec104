"""The engine's own thread when the core misbehaves, and the buffer between it and a slow reader."""

import asyncio
import contextlib
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_harness import Gated, running, simulated, tokens_of

from engine import step_loop
from engine.server.stream import ChunkBuffer
from engine.thread import EngineThread, EngineThreadConfig, Unavailable
from gateway.workers.protocol import Done, Failed, Finished, GenerateRequest, Started, TokenLogprob, Tokens
from prefix_cache.block_pool import IntegrityError


def body(request_id="r", prompt=range(10, 50), **sampling):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling}


def request(request_id="r", prompt=range(10, 50), **sampling):
    return msgspec.convert(body(request_id, prompt, **sampling), GenerateRequest)


class Faulty:
    """A core whose `step`, `add` or books fail when told to."""

    def __init__(self, core):
        self._core = core
        self.raise_in_step = 0  # how many steps yet
        self.raise_after_step = 0  # the same, with the step's work done and its chunks lost
        self.raise_in_add = 0
        self.books_are_wrong = False

    def __getattr__(self, name):
        return getattr(self._core, name)

    def step(self):
        if self.raise_in_step:
            self.raise_in_step -= 1
            raise RuntimeError("a kernel failed")
        produced = self._core.step()
        if self.raise_after_step and produced:
            self.raise_after_step -= 1
            raise RuntimeError("the sampler failed")
        return produced

    def add(self, prepared):
        self._core.add(prepared)
        if self.raise_in_add:
            self.raise_in_add -= 1
            raise KeyError("half added")

    def check_integrity(self):
        self._core.check_integrity()
        if self.books_are_wrong:
            raise IntegrityError("block 3 is in one table and has no reference")


@pytest.mark.parametrize("where", ["raise_in_step", "raise_after_step"])
async def test_a_step_that_raises_fails_what_ran_and_nothing_else(load, where):
    async with running(lambda: Faulty(load())) as replica:
        before = await replica.generate(body("before"))
        streams = [
            asyncio.create_task(replica.generate(body(f"r{number}", range(number, number + 40), max_tokens=3000)))
            for number in range(3)
        ]
        await replica.until(lambda stats: stats.running == 3 and stats.generated_tokens_total > 20)
        setattr(replica.core, where, 1)
        for chunks in await asyncio.gather(*streams):
            assert isinstance(chunks[-1], Failed)
            assert chunks[-1].code == "engine_error"
            assert not any(isinstance(chunk, Finished | Done) for chunk in chunks)
        await replica.idle()
        assert (await replica.get("/health"))[0] == 200
        assert tokens_of(await replica.generate(body("after"))) == tokens_of(before)
        text = (await replica.get("/metrics"))[1].decode()
        assert 'turnkeep_engine_requests_ended_total{outcome="failed"} 3.0' in text


async def test_a_request_that_cannot_be_queued_fails_alone(load):
    async with running(lambda: Faulty(load())) as replica:
        other = asyncio.create_task(replica.generate(body("other", max_tokens=200)))
        await replica.until(lambda stats: stats.running == 1)
        replica.core.raise_in_add = 1
        (failed,) = await replica.generate(body("bad"))
        assert (failed.code, type(failed)) == ("engine_error", Failed)
        chunks = await other
        assert isinstance(chunks[-1], Done)
        assert len(tokens_of(chunks)) == 200
        await replica.idle()
        assert len(tokens_of(await replica.generate(body("bad")))) == 8


async def test_an_engine_that_fails_again_and_again_ends_the_process(load):
    async with running(lambda: Faulty(load())) as replica:
        replica.core.raise_in_step = 100
        for number in range(3):
            assert (await replica.generate(body(f"r{number}")))[-1].code == "engine_error"
            assert (await replica.get("/health"))[0] == 200
        last = await replica.generate(body("last"))
        assert last[-1].code in ("engine_error", "engine_failed")
        async with asyncio.timeout(20):
            assert await replica.task == 3


async def test_successes_between_failures_keep_it_alive(load):
    async with running(lambda: Faulty(load())) as replica:
        for number in range(8):
            replica.core.raise_in_step = 1
            assert (await replica.generate(body(f"bad{number}")))[-1].code == "engine_error"
            assert isinstance((await replica.generate(body(f"good{number}")))[-1], Done)
        await replica.idle()


async def test_wrong_books_end_the_process():
    """Blocks that were lost never come back: better a fresh replica."""
    async with running(lambda: Faulty(simulated())) as replica:
        replica.core.books_are_wrong = True
        replica.core.raise_in_step = 1
        assert (await replica.generate(body()))[-1].code in ("engine_error", "engine_failed")
        async with asyncio.timeout(20):
            assert await replica.task == 3


@contextlib.asynccontextmanager
async def thread_of(core, **config):
    engine = EngineThread(core, EngineThreadConfig(**config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_close_ends_what_runs_and_gives_its_blocks_back():
    core = simulated()
    async with thread_of(core) as engine:
        streams = [await engine.submit(request(f"r{number}", max_tokens=3000)) for number in range(40)]
        first = await anext(streams[0])
        assert isinstance(first, Started)
        await engine.close()
        for stream in streams:
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].code == "shutting_down"
        assert engine.in_flight == 0
        with pytest.raises(Unavailable) as refused:
            await engine.submit(request("late"))
        assert refused.value.code == "shutting_down"
        with pytest.raises(Unavailable):
            await engine.snapshot()
    core.check_integrity()
    assert core.stats().free_blocks + core.stats().cached_blocks == 256


async def test_a_request_can_be_aborted_while_it_is_prepared():
    core = simulated()
    entered, go_on = threading.Event(), threading.Event()
    prepare = core.prepare

    def slow(request):
        entered.set()
        assert go_on.wait(20)
        return prepare(request)

    core.prepare = slow
    async with thread_of(core) as engine:
        submitting = asyncio.create_task(engine.submit(request()))
        await asyncio.to_thread(entered.wait, 20)
        assert engine.stats().waiting == 1
        assert engine.stats().waiting_prompt_tokens == 40
        assert await engine.abort("r")
        assert engine.stats().waiting == 0
        go_on.set()
        chunks = [chunk async for chunk in await submitting]
        assert [type(chunk) for chunk in chunks] == [Finished, Done]
        assert chunks[0].finish_reason == "abort"
        # The same for a client that leaves meanwhile.
        entered.clear()
        go_on.clear()
        submitting = asyncio.create_task(engine.submit(request()))
        await asyncio.to_thread(entered.wait, 20)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert engine.in_flight == 0
        go_on.set()
        assert core.stats().requests_total == 0


async def test_a_step_that_hangs_is_noticed():
    core = Gated(simulated())
    engine = EngineThread(core, EngineThreadConfig(hang_seconds=0.2))
    await engine.start()
    stream = await engine.submit(request())
    async with asyncio.timeout(20):
        assert "one step for more than 0.2 seconds" in await engine.failed()
    assert engine.health() is not None
    assert (await stream.read())[-1].code == "engine_failed"
    with pytest.raises(Unavailable):
        await engine.submit(request("late"))
    await engine.close(timeout=0.05)  # leaves the thread behind, and does not wait for it
    core.open()


async def test_drain_waits_for_streams_and_takes_no_more():
    async with thread_of(simulated()) as engine:
        stream = await engine.submit(request(max_tokens=100))
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as refused:
            await engine.submit(request("late"))
        assert refused.value.code == "shutting_down"
        assert len(tokens_of([chunk async for chunk in stream])) == 100
        assert await draining
    async with thread_of(simulated()) as engine:
        await engine.submit(request(max_tokens=3000))
        assert not await engine.drain(0.01)


chunk_lists = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans()), max_size=30
)


@given(chunk_lists, st.booleans(), st.sets(st.integers(0, 30)))
def test_whatever_the_reader_misses_is_merged_and_nothing_is_lost(tokens, logprobs, reads):
    buffer, seen = ChunkBuffer(), []
    pushed = [Started(5, 0, 0.0)]
    for index, ids, _ in tokens:
        probs = tuple(TokenLogprob(token, -1.0) for token in ids) if logprobs else ()
        pushed.append(Tokens(tuple(ids), index, probs))
    pushed += [Finished("length", index) for index in range(3)]
    pushed.append(Done(5, 1, 0, 0.0, 0.0, 0.0, 0))
    for place, chunk in enumerate(pushed):
        buffer.push(chunk)
        assert buffer
        if place in reads:
            taken = buffer.take()
            assert len(taken) <= 8  # started, three runs of tokens, three ends, done: however much came since the last read
            seen += taken
            assert not buffer
    seen += buffer.take()
    assert [type(chunk) for chunk in seen].count(Done) == 1
    assert isinstance(seen[0], Started)
    assert isinstance(seen[-1], Done)
    for index in range(3):
        assert tokens_of(seen, index) == tokens_of(pushed, index)
        mine = [chunk for chunk in seen if isinstance(chunk, Tokens | Finished) and chunk.index == index]
        assert [type(chunk) for chunk in mine].count(Finished) == 1
        assert isinstance(mine[-1], Finished)
        assert all(len(chunk.logprobs) == (len(chunk.token_ids) if logprobs else 0) for chunk in mine[:-1])


async def test_what_changes_after_the_last_step_is_told_without_another(load, monkeypatch):
    """Blocks go on to the tiers when nobody asks for anything any more."""
    monkeypatch.setattr(step_loop, "_LAST_LOOK", 0.05)

    class Late(Faulty):
        late = 0

        def stats(self):
            return msgspec.structs.replace(self._core.stats(), useful_fetches_total=self.late)

    async with running(lambda: Late(load())) as replica:
        await replica.generate(body())
        replica.core.late = 7
        await replica.until(lambda stats: stats.useful_fetches_total == 7)
