import random

import pytest

from gateway.telemetry import stages as module
from gateway.telemetry.stages import StageTimes


@pytest.fixture
def processor(monkeypatch):
    """A processor whose time the test spends."""

    class Processor:
        spent = 0.0
        asked = 0

        def thread_time(self):
            self.asked += 1
            return self.spent

    made = Processor()
    monkeypatch.setattr(module, "time", made)
    return made


def test_the_first_turn_is_told_as_it_was(processor):
    times = StageTimes()
    for stage, seconds in (("parse", 0.5), ("ledger", 2.0)):
        with times.spent(stage):
            processor.spent += seconds
    assert times.seconds == {"parse": 0.5, "identity": 0.0, "ledger": 2.0, "route": 0.0}


@pytest.mark.parametrize("blocks", [(0.2,), (1.0, 0.1), (0.1, 3.0, 0.4), (0.0, 0.0, 0.0, 5.0)])
def test_many_turns_cost_what_they_cost_whichever_blocks_they_are_made_of(processor, blocks):
    times, rng, truth = StageTimes(), random.Random(1), 0.0
    seen = 0.0
    for _ in range(4000):
        for block in blocks:
            with times.spent("ledger"):
                spent = block * rng.uniform(0.5, 1.5)
                processor.spent += spent
                truth += spent
            # A counter that falls looks like a restart.
            assert times.seconds["ledger"] >= seen
            seen = times.seconds["ledger"]
    assert seen == pytest.approx(truth, rel=0.05)
    assert processor.asked < 4000 * len(blocks)


def test_a_block_that_fails_counts_and_its_error_goes_on(processor):
    times = StageTimes()

    def fail():
        with times.spent("parse"):
            processor.spent += 1.0
            raise KeyError

    for _ in range(20):
        with pytest.raises(KeyError):
            fail()
    assert times.seconds["parse"] == pytest.approx(20, abs=7)
