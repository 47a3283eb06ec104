"""How much room a worker has, and which one a turn goes to."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from admission_workers import ask, waiting
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.config import AdmissionConfig
from gateway.admission.controller import Admission
from gateway.admission.rooms import WorkerRoom, choose, needed_blocks, room_of
from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.workers.protocol import WorkerInfo, WorkerStats
from gateway.workers.sharing import Sharing

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
