"""Sessions that do not come back: nothing is kept for them, and nobody waits at the door because of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.offload import virtual
from engine.bench.offload.workload import Session
from engine.models.registry import load_model
from engine.session_door import DoorConfig, SessionDoor, Turn
from engine.session_returns import Returns
from gateway.workers.protocol import RetentionHint

FIRST_CALL, FIRST_ANSWER, LATER_ANSWER = (True, False), (False, False), (False, True)


def test_calls_are_expected_back_and_answers_are_not_until_seen():
    returns = Returns()
    assert returns.leaves(1, FIRST_CALL, 10.0, expects=True)
    assert not returns.leaves(2, FIRST_ANSWER, 10.0, expects=False)
    for session in range(10, 14):
        returns.leaves(session, FIRST_ANSWER, 10.0, expects=False)
        assert returns.arrives(session, 5.0)
    assert returns.leaves(3, FIRST_ANSWER, 10.0, expects=False), "four came back of four that were waited for"
    assert not returns.leaves(4, LATER_ANSWER, 10.0, expects=False), "of those nothing is known"


def test_tools_of_which_nobody_comes_back_are_not_waited_for():
    returns = Returns()
    for session in range(1, 6):
        assert returns.leaves(session, FIRST_CALL, float(session), expects=True)
    assert returns.are_likely
    assert not returns.arrives(99, 5.5), "it was not away"
    assert not returns.leaves(6, FIRST_CALL, 20.0, expects=True), "five are gone"
    for session in range(7, 13):
        returns.leaves(session, FIRST_CALL, 20.0, expects=True)
    assert not returns.are_likely
    assert returns.arrives(6, 20.5), "too late, which counts as gone"
    returns.forget(7)
    assert not returns.arrives(7, 1.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans(), st.floats(0, 30)), max_size=200))
def test_shares_stay_bounded_and_follow_what_happens(events):
    returns, now = Returns(), 0.0
    for session, comes, called, seconds in events:
        now += seconds
        if comes:
            returns.arrives(session, now)
        else:
            returns.leaves(session, (called, False), now + 10.0, expects=called)
        assert all(returns._back.get(kind, 0.0) + returns._gone.get(kind, 0.0) <= 65 for kind in (FIRST_CALL, FIRST_ANSWER))
        assert 0.0 <= returns._likely <= 1.0


def door_with(capacity=100):
    return SessionDoor(DoorConfig(low=0.6), lambda: capacity, lambda first, last: float(last - first))


def turn(session, count, more=0):
    return Turn(f"{session}", session, (0, session, session, 0), [b"%d-%d" % (session, at) for at in range(count)], more)


def test_an_answer_without_calls_ends_what_is_kept_for_its_session_unless_it_is_pinned():
    door = door_with()
    for session in (1, 2):
        assert door.arrives(turn(session, 20), 0.0)
        door.ended(session, f"{session}", turn(session, 20).digests, 1.0)
    door.pinned(2, 30.0, 1.0)
    for session in (1, 2):
        door.away(session, 1.0, None, called=False)
    assert (door.in_progress, door.used, door.counts.unexpected) == (1, 20, 1)
    door.check_integrity()


@pytest.mark.parametrize(("return_p90", "stays"), [(None, False), (3.0, True), (29.0, True), (40.0, False)])
def test_who_reads_an_answer_is_waited_for_only_where_that_is_quick(return_p90, stays):
    door = door_with()
    for session in range(1, 9):
        assert door.arrives(turn(session, 5), 0.0)
        door.ended(session, f"{session}", turn(session, 5).digests, 0.0)
        door.away(session, 0.0, return_p90, called=False)
        assert door.in_progress == stays
        assert door.arrives(turn(session, 5), 1.0), "and it is back"
        door.ended(session, f"{session}", turn(session, 5).digests, 1.0)
        door.closed(session)


def test_a_released_session_is_not_waited_for_longer_than_it_was_before():
    door = door_with()
    assert door.arrives(turn(1, 55), 0.0)
    door.ended(1, "1", turn(1, 55).digests, 0.0)
    door.away(1, 0.0, 20.0, called=True)
    assert not door.arrives(turn(2, 20), 0.0)
    door.pinned(1, 0.0, 30.0)
    assert door.due_in(30.0, idle=False) == 10.0, "as was expected, and not a minute from now on"
    door.pinned(1, 600.0, 30.0)
    assert door.let_in(100.0, idle=False) == []
    door.pinned(1, 0.0, 100.0)
    assert [one.session for one in door.let_in(160.0, idle=False)] == [2], "nor as long as it was pinned for"


def test_who_gives_up_before_the_first_answer_leaves_the_room_to_others():
    door = door_with()
    assert door.arrives(turn(1, 55), 0.0)
    assert not door.arrives(turn(2, 20), 0.0)
    door.began(1, "1")
    door.ended(1, "1", None, 1.0)
    assert door.in_progress == 0
    assert [one.session for one in door.let_in(1.0, idle=False)] == [2]


def test_while_few_come_back_only_room_that_somebody_is_away_from_is_kept_free():
    door = door_with()
    for session in range(1, 8):
        assert door.arrives(turn(session, 5), 0.0)
        door.ended(session, f"{session}", turn(session, 5).digests, 0.0)
        door.away(session, 0.0, None, called=False)
    for session in range(11, 21):
        assert door.arrives(turn(session, 20, more=100), 0.0), "twice what there is: the queue is there for that"
    for session in range(11, 20):
        door.ended(session, f"{session}", turn(session, 20).digests, 0.0)
        door.away(session, 0.0, None, called=False)
    door.ended(20, "20", turn(20, 20).digests, 0.0)
    door.away(20, 0.0, 3.0, called=True)
    assert door.arrives(turn(21, 70), 0.0), "beyond 0.6: those that do not come back do not grow"
    assert not door.arrives(turn(22, 20), 0.0), "somebody is away, and has his room"


@pytest.fixture(scope="module")
def smallest(tiny_checkpoint):
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return load_model(tiny_checkpoint("llama", max_position_embeddings=100_000, **shape), dtype=torch.float32)


def chat(count, rate):
    generator = np.random.default_rng(1)
    system = generator.integers(3, 300, 128).astype(np.uint32)
    made, at = [], 0.0
    for number in range(count):
        at += float(generator.exponential(1 / rate))
        own = generator.integers(3, 300, int(generator.integers(200, 600))).astype(np.uint32)
        made.append(Session(f"s{number}", (np.concatenate([system, own]),), (60,), (at,)))
    return made


def conversations(count, rate):
    """Of three turns, each read for ten seconds or so."""
    generator = np.random.default_rng(2)
    made, at = [], 0.0
    for number in range(count):
        at += float(generator.exponential(1 / rate))
        ends = 128 + np.cumsum(generator.integers(200, 600, 3))
        tokens = generator.integers(3, 300, int(ends[-1])).astype(np.uint32)
        gaps = (at, *generator.exponential(10.0, 2).tolist())
        made.append(Session(f"s{number}", tuple(tokens[:end] for end in ends), (60,) * 3, gaps))
    return made


@pytest.mark.parametrize(("make", "rate"), [(chat, 1.0), (chat, 4.0), (conversations, 0.25)])
def test_a_chat_service_is_as_fast_as_first_come_first_served(smallest, make, rate, monkeypatch):
    """Of sessions of one turn or of three, which nobody closes; on a virtual clock."""

    def hint(session, request_id, gap, *, is_last):
        return RetentionHint(session=session, request_id=request_id)

    monkeypatch.setattr(virtual, "hint", hint)
    ours, plain = (
        virtual.replay_virtually(
            smallest, make(40, rate), 1.0, virtual.virtual_config(policy=policy, max_draft_tokens=0), blocks=512, hints=True
        )[0]
        for policy in ("sessions", "fcfs")
    )
    assert len(ours.completions) == len(plain.completions) == 40
    assert ours.mean_completion < 1.05 * plain.mean_completion
    assert ours.rate > 0.95 * plain.rate
