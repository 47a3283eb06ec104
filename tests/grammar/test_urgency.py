"""Compiling gives way: on a thread that is less urgent, with the same answer."""

import os
import sys
import threading

import pytest

from grammar.urgency import LESS_URGENT, aside


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="Threads have a niceness of their own on Linux only.")
def test_the_work_and_what_it_starts_step_back_and_the_caller_does_not():
    before = niceness()

    def work():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(niceness()))
        thread.start()
        thread.join()
        return niceness(), *seen

    assert aside(work) == (max(before, LESS_URGENT),) * 2
    assert niceness() == before


def test_what_the_work_raises_is_raised():
    with pytest.raises(KeyError, match="lost"):
        aside(lambda: {}["lost"])
