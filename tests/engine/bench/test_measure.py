"""Who disturbs whom is seen: with sides that burn processor time as they are told."""

import multiprocessing
import time

import pytest

from engine.bench.measure import Rate, _Turns
from engine.bench.works import Work, standard_works


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Sleeper:
    """Sleeps through its turns; `claims` seconds of processor time are said to be used by it in every turn of anybody."""

    def __init__(self, name, claims=0.0):
        self.name = name
        self.claims = claims
        self.asked = 0

    def run(self, prompts, tokens):
        time.sleep(0.2)
        return 0.2

    def cpu_seconds(self):
        self.asked += 1
        return self.asked * self.claims


WORK = Work("short", "run", ((4, 2),))


def turns_of(*sides, repeats=2):
    turns = _Turns(sides, lambda *_: None, WORK, repeats, 512)
    turns.run(lambda: [[1, 2, 3, 4]])
    return turns


def test_a_side_that_spins_during_anothers_turn_is_seen():
    turns = turns_of(Sleeper("quiet"), Sleeper("spinning", claims=0.1))
    assert turns.disturbance == pytest.approx(0.1 / 0.2)
    assert turns.seconds == {"quiet": [0.2, 0.2], "spinning": [0.2, 0.2]}
    assert turns_of(Sleeper("quiet"), Sleeper("ticks", claims=0.01)).disturbance == 0


def test_a_process_beside_the_sides_is_seen():
    neighbour = multiprocessing.get_context("spawn").Process(target=burn, args=(30.0,))
    neighbour.start()
    try:
        time.sleep(1.0)
        foreign = turns_of(Sleeper("quiet"), repeats=4).foreign
    finally:
        neighbour.kill()
        neighbour.join()
    assert foreign > 0.3


def test_a_rate_has_a_median_and_a_spread():
    rate = Rate((10.0, 30.0, 20.0))
    assert (rate.median, rate.spread) == (20.0, 1.0)


@pytest.mark.parametrize("budget", [512, 256, 64])
def test_a_sequence_has_room_for_what_it_makes_while_others_are_computed(budget):
    """Else it ends before the turns do."""
    (work,) = [work for work in standard_works(8192) if work.name == "decode 16 x 4000"]
    steps = -(-16 * 4000 // min(budget, 256)) + 16  # of the prompts, if each step had to finish the one before
    assert work.room(4000, 0, 1, budget) >= 4000 + steps + 2 * work.steps
