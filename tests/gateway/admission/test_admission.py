import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.access.entries import PRIORITY_CLASSES
from gateway.admission.config import AdmissionConfig
from gateway.admission.controller import Admission, Ask
from gateway.admission.drain import DrainMeter
from gateway.admission.rooms import WorkerRoom, choose, needed_blocks, room_of
from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import TurnError
from gateway.workers.protocol import WorkerInfo, WorkerStats
from gateway.workers.sharing import Sharing


class Workers:
    """Workers with books of their own, as the dispatcher has them."""

    def __init__(self, count=1, blocks=100, slots=2):
        self.names = [f"w{number}" for number in range(count)]
        self.blocks, self.slots = blocks, slots
        self.held = {name: [] for name in self.names}
        self.up = True

    def rooms(self, _model):
        if not self.up:
            return []
        return [WorkerRoom(name, self.blocks - sum(held), self.slots - len(held), not held) for name, held in self.held.items()]

    def place(self, need, name="w0"):
        assert next(room for room in self.rooms("m") if room.name == name).takes(need)
        self.held[name].append(need)
        return name

    def end(self, name, need):
        self.held[name].remove(need)


def ask(tenant="a", need=10, **values):
    return Ask("m", tenant, (need,), values.pop("tokens", 100), values.pop("cost", 100.0), **values)


async def waiting(admission, *asks):
    """Starts to wait for each, in order."""
    tasks = []
    for each in asks:
        tasks.append(asyncio.create_task(admission.admit(each)))
        await asyncio.sleep(0)
    return tasks


async def test_what_fits_goes_at_once_and_the_rest_when_something_ends():
    workers = Workers()
    admission = Admission(AdmissionConfig(), workers.rooms)
    first, second = await admission.admit(ask()), await admission.admit(ask())
    assert (first.waited, admission.in_flight) == (0, 2)
    # Granted and not yet on the worker's books counts as well.
    (third,) = await waiting(admission, ask())
    assert not third.done()
    for ticket in (first, second):
        workers.place(10)
        ticket.placed()
        ticket.placed()
    assert admission.depths()["normal"] == 1
    assert admission.queued_tokens() == 100
    workers.end("w0", 10)
    first.release()
    first.release()
    ticket = await third
    assert ticket.waited > 0
    assert admission.in_flight == 2
    assert admission.queued_tokens() == 0


async def test_whoever_is_going_is_on_its_worker_when_the_next_one_asks():
    workers = Workers()
    admission = Admission(AdmissionConfig(), workers.rooms)
    first = await admission.admit(ask(need=60))
    first.going()
    workers.place(60)
    # Counted twice it would leave no room.
    second = await admission.admit(ask(need=40))
    (third,) = await waiting(admission, ask(need=10))
    assert not third.done()
    second.going()
    first.release()
    workers.end("w0", 60)
    admission.freed()
    assert (await third).waited >= 0
    assert admission.in_flight == 2
    # The second was never put on the worker, so its room is free again.
    assert admission._queues["m"].booked == {"w0": [10]}


async def test_an_idle_worker_takes_anything_and_the_head_waits_for_its_room():
    workers = Workers(blocks=100, slots=10)
    admission = Admission(AdmissionConfig(), workers.rooms)
    huge = await admission.admit(ask(need=1000))
    workers.place(1000)
    huge.placed()
    large, small = await waiting(admission, ask(need=90), ask(need=1))
    workers.end("w0", 1000)
    workers.held["w0"].append(20)
    huge.release()
    await asyncio.sleep(0.01)
    # The small one would fit; if it went, the large one might wait for ever.
    assert not large.done()
    assert not small.done()
    workers.end("w0", 20)
    admission.freed()
    await asyncio.gather(large, small)


async def test_rooms_that_appear_without_a_word_are_found():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(), workers.rooms)
    workers.held["w0"].append(10)
    (task,) = await waiting(admission, ask())
    workers.held["w0"].clear()
    assert (await task).waited > 0


async def test_without_workers_nobody_waits_for_what_is_not_there():
    workers = Workers()
    workers.up = False
    admission = Admission(AdmissionConfig(), workers.rooms)
    assert (await admission.admit(ask())).waited == 0


async def test_a_client_that_leaves_leaves_the_queue():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(), workers.rooms)
    ticket = await admission.admit(ask())
    leaving, staying = await waiting(admission, ask(), ask("b"))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert admission.depths()["normal"] == 1
    ticket.release()
    await staying
    assert admission.in_flight == 1


async def test_a_grant_that_meets_a_client_on_its_way_out_goes_to_the_next():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(), workers.rooms)
    ticket = await admission.admit(ask())
    leaving, staying = await waiting(admission, ask(), ask("b"))
    ticket.release()
    # The pump runs, and sets the result; before the waiter sees it, it is cancelled.
    admission._pump("m", admission._queues["m"])
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await staying
    assert admission.in_flight == 1
    assert admission._queues["m"].booked == {"w0": [10]}


async def test_waiting_too_long_is_a_503_with_a_time():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(queue_timeout=0.05, session_queue_timeout=0.2), workers.rooms)
    await admission.admit(ask())
    birth, turn = await waiting(admission, ask(), ask(continuing=True))
    with pytest.raises(TurnError) as raised:
        await birth
    assert (raised.value.status, raised.value.code) == (503, "queue_timeout")
    assert raised.value.retry_after >= 1
    assert not turn.done()
    with pytest.raises(TurnError):
        await turn
    assert admission.sheds == {("queue_timeout", "birth"): 1, ("queue_timeout", "turn"): 1}
    assert admission.queued_tokens() == 0


async def test_a_full_queue_turns_away_the_flood_and_no_session_in_progress():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(queue_size=3), workers.rooms)
    ticket = await admission.admit(ask())
    quiet = await waiting(admission, ask("quiet"))
    flood = await waiting(admission, *[ask("noisy") for _ in range(5)])
    turns = await waiting(admission, *[ask("noisy", continuing=True) for _ in range(2)])
    # The queue holds three: the quiet tenant's birth gave way last, to turns of sessions in progress.
    for task in flood:
        with pytest.raises(TurnError) as raised:
            await task
        assert (raised.value.status, raised.value.code) == (429, "share_exceeded")
    assert not any(task.done() for task in (*quiet, *turns))
    ticket.release()
    for task in (*turns, *quiet):
        (await task).release()
    assert admission.in_flight == 0


async def test_alone_in_a_full_queue_is_overload_not_a_share():
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(queue_size=1), workers.rooms)
    await admission.admit(ask())
    kept, refused = await waiting(admission, ask(), ask())
    with pytest.raises(TurnError) as raised:
        await refused
    assert (raised.value.status, raised.value.code) == (503, "overloaded")
    kept.cancel()


async def test_births_that_would_wait_in_vain_are_told_so_at_once():
    clock = itertools.count()
    now = [0.0]
    workers = Workers(slots=1)
    admission = Admission(AdmissionConfig(queue_timeout=30), workers.rooms, clock=lambda: now[0])
    ticket = await admission.admit(ask())
    tasks = await waiting(admission, *[ask(f"t{next(clock)}") for _ in range(10)])
    for task in tasks[:2]:
        # A turn of 100 tokens every ten seconds.
        now[0] += 10
        ticket.release()
        ticket = await task
    with pytest.raises(TurnError) as raised:
        admission.check("m", "another", "normal")
    assert raised.value.status == 503
    assert 30 <= raised.value.retry_after <= 60
    with pytest.raises(TurnError):
        await admission.admit(ask("another"))
    # A session in progress goes before all births, so it may wait; so may what nothing is before.
    (turn,) = await waiting(admission, ask("another", continuing=True))
    assert not turn.done()
    ticket.release()
    await turn
    for task in tasks[2:]:
        task.cancel()


def test_the_meter_counts_only_time_in_which_somebody_waited():
    meter = DrainMeter()
    assert meter.seconds(100, 0) is None
    meter.waiting(True, 0)
    meter.granted(100, 1)
    assert meter.seconds(1000, 1) == pytest.approx(10)
    meter.waiting(False, 1)
    assert meter.seconds(1000, 1000) == pytest.approx(10)
    meter.waiting(True, 1000)
    # Nothing is granted any more: the time to wait grows.
    assert meter.seconds(1000, 1100) > 1000


INFO = WorkerInfo(
    protocol_version=1,
    instance="i",
    model="m",
    namespace="00",
    block_size=16,
    num_blocks=100,
    max_model_len=1000,
    vocab_size=10,
    max_concurrency=4,
)


def stats(**values):
    zero = {name: 0 for name in WorkerStats.__struct_fields__ if name.endswith("_total")}
    given = {"instance": "i", "running": 0, "waiting": 0, "waiting_prompt_tokens": 0, "num_blocks": 100, **zero, **values}
    return WorkerStats(**given)


def test_room_counts_what_others_use():
    room = room_of("w", INFO, None, 30, 2, ahead=0.5)
    assert (room.blocks, room.slots, room.idle) == (120, 4, False)
    busy = stats(free_blocks=10, cached_blocks=20)
    assert room_of("w", INFO, busy, 30, 3, ahead=0.0).blocks == 30
    opaque = msgspec.structs.replace(INFO, num_blocks=0, max_concurrency=0)
    assert room_of("w", opaque, None, 10**6, 1000, ahead=0).takes(10**9)


def test_turns_of_sessions_in_progress_pass_those_that_are_held_at_a_worker():
    held = stats(free_blocks=100, cached_blocks=0, held=3, held_blocks=70)
    room = room_of("w", INFO, held, 100, 4, ahead=0.0)
    assert (room.blocks, room.slots) == (0, 0)
    assert not room.takes(60)
    assert room.takes(70, continuing=True)
    assert not room.takes(71, continuing=True)
    assert choose([room], [60]) is None
    assert choose([room], [60], continuing=True) == [(room, 60)]
    assert not room.takes(20, continuing=True), "what is granted is booked"
    # Others' requests are held there as well: nobody has more room for that.
    assert room_of("w", INFO, held, 20, 1, ahead=0.0).held_blocks == 20


async def test_a_turn_of_a_session_in_progress_goes_where_new_ones_wait():
    room = room_of("w", INFO, stats(free_blocks=100, cached_blocks=0, held=2, held_blocks=60), 100, 3, ahead=0.0)
    admission = Admission(AdmissionConfig(), lambda _: [replace(room)])
    (birth,) = await waiting(admission, ask(need=50))
    assert not birth.done()
    await admission.admit(ask(need=50, continuing=True, tenant="b"))
    assert not birth.done()
    birth.cancel()


def test_several_prompts_go_together_or_not_at_all():
    rooms = [WorkerRoom("a", 10, 2, False), WorkerRoom("b", 15, 2, False)]
    assert choose(rooms, [10, 10, 10]) is None
    assert [room.blocks for room in rooms] == [10, 15]
    booked = choose(rooms, [10, 10])
    assert sorted(room.name for room, _ in booked) == ["a", "b"]
    # More than there will ever be room for goes when nothing else runs.
    idle = [WorkerRoom("a", 10, 1, True)]
    assert choose(idle, [10] * 5) is not None
    assert choose([WorkerRoom("a", 10, 1, False)], [10] * 5) is None


@pytest.mark.parametrize(
    ("tokens", "output", "blocks"),
    [
        (1, 0, 1),
        (16, 0, 1),
        (17, 0, 2),
        (16, 16, 2),
        # An eighth of 1600 tokens, and what is left of a context of 1000.
        (16, 5000, 14),
        (990, 100, 63),
        (2000, 100, 125),
    ],
)
def test_blocks_that_a_turn_needs(tokens, output, blocks):
    assert needed_blocks(tokens, output, INFO) == blocks
    assert needed_blocks(tokens, output, msgspec.structs.replace(INFO, num_blocks=0)) == 0


counts = st.integers(0, 200)


@given(
    blocks=counts,
    requests=st.integers(0, 9),
    need=counts,
    free=st.none() | counts,
    cached=counts,
    capacity=st.booleans(),
    factor=st.floats(0.1, 1.0),
)
def test_the_quick_look_sees_what_the_thorough_one_does(blocks, requests, need, free, cached, capacity, factor):
    info = INFO if capacity else msgspec.structs.replace(INFO, num_blocks=0, max_concurrency=0)
    reported = None if free is None else stats(free_blocks=free, cached_blocks=cached)
    books, sharing = SimpleNamespace(blocks=blocks), SimpleNamespace(factor=factor)
    member = SimpleNamespace(name="w", info=info, stats=reported, books=books, sharing=sharing, requests=requests)
    dispatcher = PoolDispatcher(PoolConfig(models=("m",)))
    assert dispatcher._has_room(member, need) == dispatcher._room(member).takes(need)


def test_what_sessions_begin_with_alike_is_held_once():
    sharing = Sharing()
    # Ten requests of 40 blocks, of which 30 are a prompt that all of them begin with.
    report = stats(num_blocks=1000, free_blocks=700, cached_blocks=170)
    sharing.observe(4, report)
    assert sharing.factor == 1
    for _ in range(30):
        sharing.observe(400, report)
    assert sharing.factor == pytest.approx(130 / 400, rel=0.01)
    # One report that says otherwise is enough to be careful again.
    sharing.observe(400, stats(num_blocks=1000, free_blocks=600, cached_blocks=0))
    assert sharing.factor == 1


async def test_one_look_is_enough_while_there_is_room():
    workers = Workers(3)
    looks = []

    def rooms(model):
        looks.append(model)
        return workers.rooms(model)

    admission = Admission(AdmissionConfig(), rooms, some_room=lambda model: workers.rooms(model)[0])
    for _ in range(2):
        await admission.admit(ask())
        workers.held["w0"].append(10)
        admission._queues["m"].booked.clear()
    assert looks == []
    # That one is full; the others are not.
    assert (await admission.admit(ask())).waited == 0
    assert looks == ["m"]


class Admitting(RuleBasedStateMachine):
    """Turns come, wait, leave, run and end in any order. Workers never hold more than they take, whoever was let in comes to
    an end, and in the end nothing is held and nobody waits."""

    SLOTS, BLOCKS = 2, 50

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.workers = Workers(2, self.BLOCKS, self.SLOTS)
        self.admission = Admission(AdmissionConfig(queue_size=4, max_queued_tokens=1500), self.workers.rooms)
        self.tasks = {}
        self.granted = []
        self.running = []

    def turn_loop(self, rounds=6):
        async def rest():
            for _ in range(rounds):
                await asyncio.sleep(0)

        self.loop.run_until_complete(rest())
        for task in [task for task in self.tasks if task.done()]:
            asked = self.tasks.pop(task)
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self.granted.append((task.result(), asked))
            else:
                assert isinstance(error, TurnError)
                assert error.status in (429, 503)
                assert 1 <= error.retry_after <= 60

    def call(self, function):
        async def inside():
            function()

        self.loop.run_until_complete(inside())

    @rule(
        tenant=st.sampled_from("abc"),
        need=st.integers(1, 80),
        priority=st.sampled_from(PRIORITY_CLASSES),
        continuing=st.booleans(),
        tokens=st.integers(1, 600),
    )
    def come(self, tenant, need, priority, continuing, tokens):
        asked = ask(tenant, need, priority=priority, continuing=continuing, tokens=tokens)

        async def start():
            return asyncio.ensure_future(self.admission.admit(asked))

        self.tasks[self.loop.run_until_complete(start())] = asked
        self.turn_loop()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def leave(self, data):
        position = data.draw(st.integers(0, len(self.tasks) - 1))
        list(self.tasks)[position].cancel()
        self.turn_loop()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), fails=st.booleans())
    def place(self, data, fails):
        ticket, asked = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        if fails:
            self.call(ticket.release)
        else:
            name = self.workers.place(asked.needs[0], ticket._turn.booked[0][0])
            self.call(ticket.placed)
            self.running.append((ticket, name, asked.needs[0]))
        self.turn_loop()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        ticket, name, need = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.workers.end(name, need)
        self.call(ticket.release)
        self.turn_loop()

    @invariant()
    def bounds_hold(self):
        for held in self.workers.held.values():
            assert len(held) <= self.SLOTS
            assert sum(held) <= self.BLOCKS or len(held) == 1
        assert self.admission.in_flight == len(self.granted) + len(self.running)
        assert sum(self.admission.depths().values()) == len(self.tasks) <= 12
        assert self.admission.queued_tokens() == sum(asked.tokens for asked in self.tasks.values()) <= 1500
        booked = sorted(blocks for held in getattr(self.admission._queues.get("m"), "booked", {}).values() for blocks in held)
        assert booked == sorted(asked.needs[0] for _, asked in self.granted)
        if self.tasks:
            # Somebody waits only where something runs or is about to.
            assert self.granted or self.running

    def teardown(self):
        while self.granted or self.running:
            for ticket, asked in self.granted:
                name = self.workers.place(asked.needs[0], ticket._turn.booked[0][0])
                self.running.append((ticket, name, asked.needs[0]))
                self.call(ticket.placed)
            self.granted = []
            if self.running:
                ticket, name, need = self.running.pop()
                self.workers.end(name, need)
                self.call(ticket.release)
            self.turn_loop()
        still = list(self.tasks)
        for task in still:
            task.cancel()
        self.turn_loop()
        self.loop.close()
        assert not still, "they wait for nothing"
        assert self.admission.in_flight == 0
        assert self.admission.queued_tokens() == 0


TestAdmitting = Admitting.TestCase
TestAdmitting.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
