"""Who is let in, who waits, and who is turned away."""

import asyncio
import itertools

import pytest
from admission_workers import Workers, ask, waiting

from gateway.admission.config import AdmissionConfig
from gateway.admission.controller import Admission
from gateway.admission.drain import DrainMeter
from gateway.turn import TurnError


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
