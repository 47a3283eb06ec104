"""Workers that freeze, fall silent, or are told to go, under streams that must not notice."""

import asyncio
import functools
import signal

import aiohttp
import pytest
import pytest_asyncio
from cluster import Cluster, dice, replicas_at, simulated
from live_gateway import serve
from streams import ask, ask_all, plain_ask
from wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS = 8


class Under:
    """A cluster with streams under way, to which some fault is about to be done. The first worker is reached over a wire."""

    def __init__(self, made, wire, session, bodies):
        self.made, self.wire, self.session, self.bodies = made, wire, session, bodies
        self.far, self.near = made.replicas

    async def all_at_once(self):
        return [answer.said() for answer in await ask_all(self.session, self.made.url, self.bodies, STREAMS)]

    async def begin(self):
        """Returns when every stream has said something, and both workers are at work."""
        self.resumed = await self.made.metric("streams_resumed_total")
        began, said = asyncio.Event(), set()

        def note(number, answer):
            if any(choice.content for choice in answer.choices.values()):
                said.add(number)
            if len(said) == len(self.bodies):
                began.set()

        self.streams = [
            asyncio.create_task(ask(self.session, self.made.url, body, on_event=functools.partial(note, number)))
            for number, body in enumerate(self.bodies)
        ]
        async with asyncio.timeout(60):
            await began.wait()
        assert (await self.far.stats()).running, "nothing runs at the far end"

    async def equal(self):
        """They all came to the end that they would have come to. Returns how many went on elsewhere."""
        answers = await asyncio.gather(*self.streams)
        assert all(answer.complete for answer in answers), [answer.error for answer in answers if not answer.complete]
        assert [answer.said() for answer in answers] == self.expected
        return await self.made.metric("streams_resumed_total") - self.resumed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def under(smollm2_dir, tmp_path_factory):
    throws = dice(5)
    bodies = [plain_ask(number, throws, 80) for number in range(STREAMS)]
    hasty, patient = (simulated(smollm2_dir, "--shutdown-timeout", seconds, step=0.02) for seconds in (0.2, 60))
    options = ("--pool-unresponsive-after", 5, "--pool-probe-timeout", 2, "--pool-poll-interval", 0.2)
    options += ("--policy", "round_robin")  # half of the streams on each
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        replicas_at(tmp_path_factory.mktemp("lost"), [hasty, patient]) as (far, near),
        Wire(far.socket) as wire,
        aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session,
    ):
        workers = ("--worker", wire.url, "--worker", near.url)
        with serve("--model", smollm2_dir, "--served-model-name", "m", *workers, *options) as served:
            made = Under(Cluster([far, near], served), wire, session, bodies)
            await made.made.workers_up(2)
            made.expected = await made.all_at_once()
            yield made


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def everybody_is_well(under):
    """Before each test both workers take requests; after it nothing is in flight, no block lost, no stream lost."""
    before = (await under.far.stats()).requests_total

    async def far_is_trusted():
        await ask(under.session, under.made.url, {**under.bodies[1], "max_tokens": 2})
        return (await under.far.stats()).requests_total > before

    await under.made.until(far_is_trusted)
    yield
    await under.made.workers_up(2)
    await under.made.nothing_is_left()
    assert await under.made.metric("streams_lost_total") == 0


async def test_a_frozen_worker(under):
    await under.begin()
    under.far.signal(signal.SIGSTOP)
    try:
        assert await under.equal() >= 1
        assert await under.made.metric("worker_up") == 1
        # New requests go to the other one, at once.
        assert (await ask(under.session, under.made.url, under.bodies[1])).complete
    finally:
        under.far.signal(signal.SIGCONT)
    # It thaws: its old requests were given up, and it takes new ones.
    await under.made.workers_up(2)
    assert (await under.far.idle()).aborted_total >= 1


async def test_a_line_that_goes_dark(under):
    await under.begin()
    under.wire.go_dark()
    try:
        assert await under.equal() >= 1
    finally:
        under.wire.light()


@pytest.mark.parametrize("patient", [True, False])
async def test_a_worker_that_is_told_to_go(under, patient):
    """SIGTERM: its streams end there, or, where they take longer than it may wait, elsewhere."""
    await under.begin()
    going = under.near if patient else under.far
    assert (await going.stats()).running
    going.signal(signal.SIGTERM)
    assert await under.all_at_once() == under.expected
    resumed = await under.equal()
    assert await going.process.wait() == 0
    assert (resumed == 0) == patient
    await going.start()


async def test_a_drained_worker_finishes_and_gets_nothing_new(under):
    session, workers = under.session, under.made.url + "/workers"
    await under.begin()
    before = (await under.far.stats()).requests_total
    async with session.post(workers + "/worker-0/drain") as response:
        shown = await response.json()
        assert (response.status, shown["name"], shown["draining"], shown["state"]) == (200, "worker-0", True, "ready")
        assert shown["in_flight"] >= 1
    assert await under.all_at_once() == under.expected
    async with session.post(workers + "/worker-0/drain", params={"wait": "60"}) as response:
        assert (await response.json())["in_flight"] == 0
    assert await under.equal() == 0
    assert (await under.far.stats()).requests_total == before
    async with session.delete(workers + "/worker-0/drain") as response:
        assert (response.status, (await response.json())["draining"]) == (200, False)
    await under.all_at_once()
    assert (await under.far.stats()).requests_total > before
    for path, query, status in (("nobody", {}, 404), ("worker-0", {"wait": "soon"}, 400), ("worker-0", {"wait": "nan"}, 400)):
        async with session.post(f"{workers}/{path}/drain", params=query) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]
