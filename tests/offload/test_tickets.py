"""A load that two threads work at: what counts as loaded, and that nothing is written once it is off."""

import threading
import time

import hypothesis.strategies as st
from hypothesis import given, settings

from offload.tickets import LANES, LoadTicket

actions = st.tuples(st.sampled_from(["take", "take", "has", "lacks"]), st.integers(0, 7))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.lists(actions, max_size=40))
def test_loaded_are_those_from_the_first_up_to_the_first_that_is_not_there(count, history):
    ticket = LoadTicket([bytes([number]) for number in range(count)], range(count), 1.0)
    taken: list[int] = []
    here: set[int] = set()
    lost: set[int] = set()
    for what, which in history:
        if what == "take":
            index = ticket.take()
            if index is not None:
                assert index not in taken, "two threads load one block"
                assert all(index < other for other in lost)
                taken.append(index)
        elif taken and which in taken and which not in here | lost:
            (here if what == "has" else lost).add(which)
            if what == "has":
                ticket.has(which, "host")
            else:
                ticket.lacks(which)
        expected = 0
        while expected in here:
            expected += 1
        assert ticket.loaded == expected
    assert sum(ticket.by_tier.values()) == len(here)
    assert ticket.cancel() == ticket.loaded
    assert ticket.take() is None


def test_it_is_done_when_the_last_thread_has_left_it_and_nothing_is_left():
    ticket = LoadTicket([b"a", b"b"], [0, 1], 1.0)
    assert ticket.enter()
    assert ticket.take() == 0
    assert not ticket.enter()
    assert ticket.take() == 1
    assert not ticket.leave()
    assert ticket.leave()


def test_when_it_is_called_off_no_thread_writes_any_more():
    for _ in range(30):
        ticket = LoadTicket([b""] * 1000, range(1000), 1.0)
        memory = bytearray(1000)
        off = threading.Event()
        late: list[int] = []

        def work(lane, ticket=ticket, memory=memory, off=off, late=late):
            while (index := ticket.take()) is not None:
                with ticket.lanes[lane]:
                    if ticket.cancelled:
                        return
                    if off.is_set():
                        late.append(index)
                    memory[index] = 1
                ticket.has(index, "host")

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(LANES)]
        for thread in threads:
            thread.start()
        while ticket.loaded < 5 and any(thread.is_alive() for thread in threads):
            time.sleep(0)
        loaded = ticket.cancel()
        off.set()
        before = bytes(memory)
        for thread in threads:
            thread.join(30)
        assert not late
        assert bytes(memory) == before
        assert all(memory[:loaded])
