"""Who goes in and who waits at the door: by example, and as a state machine in which nobody starves whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.session_door import DoorConfig, SessionDoor, Turn


def blocks(session, count, shared=0):
    """Names as of chained blocks, which say what comes before: the first `shared` are everybody's."""
    return tuple(b"shared-%d" % at if at < shared else b"%d/%d-%d" % (session, shared, at) for at in range(count))


class Hall:
    """A door, and what comes to it. Computing a block takes a second."""

    def __init__(self, capacity=100, **config):
        self.now = 0.0
        self.arrivals = 0
        self.capacity = capacity
        self.door = SessionDoor(DoorConfig(**config), lambda: self.capacity, lambda first, last: float(last - first))

    def come(self, session, count, shared=0, seniority=None, more=0):
        """A turn's name, and whether it went in at once."""
        self.arrivals += 1
        name = f"{session}/{self.arrivals}"
        rank = (0, self.arrivals if seniority is None else seniority, self.arrivals, 0)
        return name, self.door.arrives(Turn(name, session, rank, blocks(session, count, shared), more), self.now)

    def turn(self, session, count, shared=0, **settings):
        """A turn that goes in at once, from its beginning to its end."""
        name, went = self.come(session, count, shared, **settings)
        assert went
        self.end(name, count, shared)

    def end(self, name, count, shared=0):
        session = int(name.split("/")[0])
        self.door.began(session, name)
        self.door.ended(session, name, blocks(session, count, shared), self.now)

    def look(self, idle=False):
        return [turn.request_id for turn in self.door.let_in(self.now, idle=idle)]

    def names(self):
        return [turn.request_id for turn in self.door.waiting]


def test_sessions_that_fit_go_at_once_and_what_they_share_counts_once():
    hall = Hall(capacity=100, low=0.8)
    for session in (1, 2, 3):
        hall.turn(session, 60, shared=50)
    assert (hall.door.used, hall.door.in_progress) == (80, 3)
    name, went = hall.come(4, 60, shared=50)
    assert not went
    assert hall.look() == []
    hall.door.closed(1)
    assert hall.look() == [name]
    assert hall.door.used == 80


def test_a_session_in_progress_goes_at_once_however_large_it_grows_and_the_cheapest_pauses():
    hall = Hall(low=0.8)
    hall.turn(1, 30)
    hall.turn(2, 10)
    hall.turn(3, 20)
    name, went = hall.come(1, 70)
    assert went
    assert hall.door.pause_overflow(hall.now) == ([], []), "full is not too full"
    hall.end(name, 75)
    assert hall.door.pause_overflow(hall.now) == ([2], [])
    assert hall.door.is_paused(2)
    assert hall.door.used == 95
    back, went = hall.come(2, 12, seniority=2)
    assert not went
    hall.door.closed(3)
    assert hall.look() == [], "75 and 12 are more than `low`"
    hall.door.closed(1)
    assert hall.look() == [back]
    assert (hall.door.counts.paused, hall.door.counts.resumed) == (1, 1)


def test_the_earliest_session_and_one_whose_turn_is_computed_never_pause_and_one_that_waits_in_the_queue_goes_back():
    hall = Hall()
    hall.turn(1, 5)
    hall.turn(2, 10)
    hall.turn(3, 20)
    hall.turn(4, 25)
    running, _ = hall.come(2, 40)
    hall.door.began(2, running)
    queued, _ = hall.come(3, 60)
    paused, back = hall.door.pause_overflow(hall.now)
    assert (paused, [turn.request_id for turn in back]) == ([4, 3], [queued]), "the cheapest of those that may come first"
    assert hall.names() == [queued]
    assert hall.door.pause_overflow(hall.now) == ([], [])


def test_earlier_sessions_go_in_first_and_a_small_one_does_not_pass_a_large_one():
    hall = Hall(low=0.8)
    hall.turn(1, 60)
    large, _ = hall.come(2, 40)
    small, went = hall.come(3, 1)
    assert not went
    early, went = hall.come(4, 30, seniority=-5)
    assert not went
    assert hall.names() == [early, large, small]
    hall.door.closed(1)
    assert hall.look() == [early, large, small]


def test_who_is_first_goes_in_when_others_have_passed_often_enough():
    hall = Hall(low=0.8, overtakes=3)
    hall.turn(1, 50)
    hall.turn(2, 29)
    first, _ = hall.come(3, 40)
    second, _ = hall.come(4, 40)
    for _ in range(3):
        assert hall.look() == []
        hall.turn(2, 29)
    assert hall.look() == [first], "one for every three"
    assert hall.door.pause_overflow(hall.now) == ([2], []), "not the one that has just come in"
    hall.end(first, 45)
    for _ in range(3):
        assert hall.look() == []
        hall.turn(1, 50)
    assert hall.look() == [second]
    assert hall.door.counts.overtaken == 2


def test_an_idle_engine_lets_in_who_costs_no_more_than_the_idleness():
    hall = Hall(low=0.8, most_idle=60.0, patience=1000.0)
    hall.turn(1, 50)
    hall.turn(2, 29)
    hall.now = 10.0
    first, _ = hall.come(3, 40)
    assert hall.door.due_in(hall.now, idle=True) == 29.0, "of computing the second session again"
    hall.now = 20.0
    hall.door.worked(6.0)
    assert hall.door.due_in(hall.now, idle=True) == 25.0
    assert hall.look(idle=True) == []
    hall.now = 50.0
    assert hall.look(idle=False) == [], "there is something to compute"
    assert hall.look(idle=True) == [first]
    assert hall.door.counts.idle == 1
    hall.end(first, 40)
    assert hall.door.pause_overflow(hall.now) == ([2], [])
    second, _ = hall.come(4, 40)
    assert hall.door.due_in(hall.now, idle=True) == 35.0, "40, of which 5 have been saved"
    hall.now = 300.0
    assert hall.look(idle=True) == [second]
    hall.end(second, 40)
    hall.door.pause_overflow(hall.now)
    hall.come(5, 40)
    assert hall.door.due_in(hall.now, idle=True) == 20.0, "a minute is remembered, of which 40 seconds are spent"


def test_sessions_that_do_not_come_back_make_room():
    hall = Hall(low=0.8, patience=60.0)
    hall.turn(1, 50)
    hall.turn(2, 29)
    hall.door.away(2, hall.now, 5.0, called=True)
    hall.door.away(1, hall.now, 400.0, called=True)
    hall.door.pinned(7, 400.0, hall.now)
    waiting, _ = hall.come(3, 29)
    assert hall.door.due_in(hall.now, idle=False) == 10.0
    hall.now = 9.9
    assert hall.look() == []
    hall.now = 10.0
    assert hall.look() == [waiting]
    assert hall.door.counts.gone == 1
    hall.end(waiting, 29)
    other, _ = hall.come(4, 29)
    hall.now = 70.0
    assert hall.look() == [other], "nobody has said when the third is back, and nobody waits for long for the first"
    assert hall.door.in_progress == 1


def test_a_pinned_session_stays_as_long_as_it_is_pinned_and_pauses_last():
    hall = Hall(low=0.8)
    hall.turn(1, 30)
    hall.turn(2, 10)
    hall.turn(3, 35)
    hall.door.pinned(2, 100.0, 0.0)
    hall.now = 70.0
    hall.turn(1, 30, seniority=1)
    assert hall.door.in_progress == 2, "the first has just come again, and the third has gone"
    hall.turn(4, 20)
    hall.turn(1, 75)
    assert hall.door.pause_overflow(hall.now) == ([4], [])
    hall.turn(1, 90)
    assert hall.door.pause_overflow(hall.now) == ([], [])
    hall.turn(1, 91)
    assert hall.door.pause_overflow(hall.now) == ([2], []), "a hint, not a reservation"


def test_who_leaves_the_door_lets_the_next_one_in():
    hall = Hall(low=0.8)
    hall.turn(1, 70)
    large, _ = hall.come(2, 40)
    small, _ = hall.come(3, 5)
    assert hall.door.leaves(large)
    assert not hall.door.leaves(large)
    assert hall.look() == [small]


def test_an_open_door_keeps_nobody():
    hall = Hall(low=0.8)
    hall.turn(1, 70)
    names = [hall.come(session, 40)[0] for session in (2, 3, 4)]
    hall.door.open()
    assert hall.door.due_in(hall.now, idle=False) == 0
    assert hall.look() == names
    assert hall.door.pause_overflow(hall.now) == ([], [])


def test_a_session_larger_than_everything_goes_when_nobody_else_is_there():
    hall = Hall(low=0.8)
    huge, went = hall.come(1, 500)
    assert went
    other, went = hall.come(2, 5)
    assert not went
    hall.end(huge, 500)
    hall.door.closed(1)
    assert hall.look() == [other]


def test_a_closed_session_goes_with_its_last_turn_unless_it_comes_again():
    hall = Hall()
    running, _ = hall.come(1, 10)
    hall.door.closed(1)
    assert hall.door.in_progress == 1
    hall.end(running, 10)
    assert (hall.door.in_progress, hall.door.used) == (0, 0)
    running, _ = hall.come(1, 10)
    hall.door.closed(1)
    again, went = hall.come(1, 12)
    assert went
    hall.end(running, 10)
    hall.end(again, 12)
    assert hall.door.in_progress == 1


class Doorway(RuleBasedStateMachine):
    """Whatever comes, goes and is said, the books balance; and once nothing new comes, everybody gets his turn."""

    sessions = st.integers(1, 8)

    def __init__(self):
        super().__init__()
        self.hall = Hall(capacity=40, low=0.7, high=0.9, overtakes=4, patience=20.0, most_idle=5.0)
        self.sizes = {}
        self.queued = {}
        self.running = {}
        self.passed_first = (None, 0)

    def let(self, names):
        for name in names:
            self.queued[name] = True

    @rule(session=sessions, grow=st.integers(0, 12), shared=st.integers(0, 4), more=st.integers(0, 3), old=st.booleans())
    def come(self, session, grow, shared, more, old):
        count = self.sizes[session] = max(1, min(self.sizes.get(session, 0) + grow, 60))
        first = self.hall.door.waiting[0].request_id if self.hall.door.waiting else None
        passes_door = session not in self.hall.door._sessions
        name, went = self.hall.come(session, count, min(shared, count), seniority=session if old else None, more=more)
        if went:
            self.let([name])
            if first is not None and passes_door:
                self.passed_first = (first, 0)  # an earlier one, which had room: the count is since the last that went in
            elif first is not None:
                kept, passes = self.passed_first
                self.passed_first = (first, passes + 1 if kept == first else 1)

    @rule(session=sessions)
    def rewrite(self, session):
        self.sizes[session] = 1

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def begin(self, data):
        name = data.draw(st.sampled_from(sorted(self.queued)))
        del self.queued[name]
        self.running[name] = True
        self.hall.door.began(int(name.split("/")[0]), name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.floats(0, 5), more=st.integers(0, 2), dropped=st.booleans())
    def end(self, data, seconds, more, dropped):
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        session = int(name.split("/")[0])
        self.hall.now += seconds
        self.hall.door.worked(seconds)
        digests = None if dropped else blocks(session, self.sizes[session] + more)
        self.hall.door.ended(session, name, digests, self.hall.now)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def drop_queued(self, data):
        name = data.draw(st.sampled_from(sorted(self.queued)))
        del self.queued[name]
        self.hall.door.ended(int(name.split("/")[0]), name, None, self.hall.now)

    @precondition(lambda self: self.hall.door.waiting)
    @rule(data=st.data())
    def leave(self, data):
        assert self.hall.door.leaves(data.draw(st.sampled_from(self.hall.names())))

    @rule(session=sessions, seconds=st.none() | st.floats(0.1, 50), called=st.booleans())
    def expect(self, session, seconds, called):
        self.hall.door.away(session, self.hall.now, seconds, called=called)

    @rule(session=sessions, seconds=st.floats(0, 100))
    def pin(self, session, seconds):
        self.hall.door.pinned(session, seconds, self.hall.now)

    @rule(session=sessions)
    def close(self, session):
        self.hall.door.closed(session)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.hall.now += seconds

    @rule(capacity=st.sampled_from([1, 20, 40, 80]))
    def tiers_come_and_go(self, capacity):
        self.hall.capacity = capacity

    @rule()
    def look(self):
        door = self.hall.door
        idle = not (self.queued or self.running)
        due = door.due_in(self.hall.now, idle=idle)
        went = self.hall.look(idle=idle)
        if due == 0 and not went:
            assert door.due_in(self.hall.now, idle=idle) != 0, "an engine would look again and again"
        self.let(went)
        if door.waiting:
            assert door.in_progress, "somebody waits for nobody"
        before = set(door._sessions)
        eldest = min(door._sessions, key=lambda one: door._sessions[one].born, default=None)
        paused, back = door.pause_overflow(self.hall.now)
        assert eldest not in paused
        assert set(paused) == before - set(door._sessions)
        for turn in back:
            del self.queued[turn.request_id]
        busy = {int(name.split("/")[0]) for name in self.running}
        assert not busy & set(paused)
        if door.used > 0.9 * self.hall.capacity:
            spared = {one for one, known in door._sessions.items() if known.is_fresh or known.begun}
            assert set(door._sessions) <= spared | {eldest}, "somebody could have paused"

    @invariant()
    def books_balance(self):
        self.hall.door.check_integrity()
        inside = {name for known in self.hall.door._sessions.values() for name in known.turns}
        assert inside == set(self.queued) | set(self.running), "every turn that was let in and has not ended, and no other"

    @invariant()
    def nobody_is_passed_for_ever(self):
        first, passes = self.passed_first
        if self.hall.names()[:1] != [first]:
            self.passed_first = (None, 0)
        elif passes >= 4:
            went = self.hall.look()
            assert went[:1] == [first], "four have passed"
            self.let(went)

    def teardown(self):
        for _ in range(1000):
            if not (self.queued or self.running or self.hall.door.waiting):
                break
            if not (self.queued or self.running):
                due = self.hall.door.due_in(self.hall.now, idle=True)
                assert due is not None, "turns wait and nothing will ever wake them"
                self.hall.now += due + 1e-6
            self.look()
            self.books_balance()
            for name in list(self.queued):
                del self.queued[name]
                self.running[name] = True
                self.hall.door.began(int(name.split("/")[0]), name)
            for name in list(self.running):
                del self.running[name]
                session = int(name.split("/")[0])
                self.hall.door.ended(session, name, blocks(session, self.sizes[session]), self.hall.now)
        else:
            raise AssertionError("somebody starves")
        self.hall.door.check_integrity()


TestDoorway = Doorway.TestCase
TestDoorway.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("setting", ["low", "high", "overtakes", "patience", "most_idle"])
def test_settings_that_cannot_work_are_refused(setting):
    bad = {"low": 0.0, "high": 0.5, "overtakes": 0, "patience": 0.0, "most_idle": 0.0}[setting]
    with pytest.raises(ValueError, match=setting):
        DoorConfig(**{setting: bad})
