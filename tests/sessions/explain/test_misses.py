"""What is remembered of misses, in bounds, and what is advised."""

import tracemalloc

import pytest

from sessions.explain.causes import first_difference
from sessions.explain.conversation import Conversation
from sessions.explain.misses import Left, Miss, MissLog, Place, advice_from


def said(*texts, tools=()):
    roles = ("user", "assistant")
    return Conversation([{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], tools)


def miss(cause="timestamp", path="messages[0].content", message=0, lost=1000, **fields):
    return Miss(request_id="r", at=1.0, cause=cause, path=path, message=message, lost_tokens=lost, **fields)


def test_a_turn_is_compared_with_the_one_before_and_its_answer():
    log = MissLog(10**6)
    assert log.previous("t", "s") is None
    log.remember("t", "s", said("a"), 0)
    log.answered("t", "s", {"role": "assistant", "content": "b"}, Left(7, Place("w")))
    log.remember("t", "s", said("a", "b", "c"), 2)
    before = log.previous("t", "s")
    assert [message["content"] for message in before.messages] == ["a", "b", "c"]
    assert log.previous("u", "s") is None
    found = first_difference(before, said("a", "b", "other"))
    assert (found.cause, found.path) == ("history_edited", "messages[2].content")
    log.remember("t", "s", said("x"), 0)
    assert [message["content"] for message in log.previous("t", "s").messages] == ["x"]
    log.forget("t", "s")
    assert log.previous("t", "s") is None
    assert (len(log), log.nbytes) == (0, 0)


def test_the_answer_of_a_session_that_was_forgotten_is_nobody_s():
    log = MissLog(10**6)
    log.answered("t", "s", {"role": "assistant", "content": "b"}, Left(7, Place("w")))
    assert len(log) == 0


def test_memory_is_bounded_whatever_comes():
    log = MissLog(20_000)
    for number in range(500):
        log.remember("t", f"s{number}", said("x" * 1000), 0)
        assert log.nbytes <= 20_000
    assert log.previous("t", "s0") is None
    assert log.previous("t", "s499") is not None
    for _ in range(100):
        log.add("t", "s499", miss())
        assert log.nbytes <= 20_000
    assert 0 < len(log.misses("t", "s499")) < 32
    log = MissLog(10**6)
    for number in range(100):
        log.add("t", "s", miss(lost=number))
    assert [entry.lost_tokens for entry in log.misses("t", "s")] == list(range(68, 100))
    assert log.misses("u", "s") == ()
    log.remember("t", "huge", said("x" * 10**7), 0)
    assert log.nbytes <= 10**6
    assert log.previous("t", "huge") is None


def test_what_repeats_at_the_top_is_advised_with_its_saving():
    seen = [miss(lost=3000, lost_seconds=1.0), miss(lost=5000, lost_seconds=2.0), miss("evicted", ""), miss("evicted", "")]
    [advice] = advice_from(seen)
    assert (advice.cause, advice.path, advice.times) == ("timestamp", "messages[0].content", 2)
    assert (advice.saved_tokens_per_turn, advice.saved_seconds_per_turn) == (4000, 1.5)
    assert "a time at messages[0].content changes with every turn" in advice.text
    assert "about 4000 tokens" in advice.text
    assert advice_from([miss()]) == []
    assert advice_from([]) == []


def test_the_costliest_comes_first_and_a_place_in_the_history_moves_on_with_it():
    again = [miss("arguments_reserialised", f"messages[{n}].tool_calls[0].function.arguments", n, lost=10) for n in (2, 4, 6)]
    tools = [miss("tools_reordered", f"tools[{n}]", None, lost=8000) for n in (0, 2)]
    first, second = advice_from([*again, *tools])
    assert (first.cause, first.path, first.saved_seconds_per_turn) == ("tools_reordered", "", None)
    assert (second.path, second.times) == ("messages[*].tool_calls[0].function.arguments", 3)


def test_the_bound_is_one_on_real_memory():
    """What it says that it takes, and what it takes."""
    log = MissLog(4_000_000)
    tracemalloc.start()
    try:
        for number in range(10_000):
            log.remember("tenant", f"session {number}" * 8, said("x" * 200, "y" * 50), 0)
            log.add("tenant", f"session {number}" * 8, miss())
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert log.nbytes <= 4_000_000
    assert taken < 1.5 * log.nbytes


@pytest.mark.parametrize(
    ("one", "two", "other"),
    [
        (Place("replica-0", "a"), Place("replica-0", "b"), True),
        (Place("replica-0", "a"), Place("worker-0", "a"), False),
        (Place("replica-0"), Place("replica-1", "b"), True),
        (Place("replica-0"), Place("replica-0", "b"), False),
        (Place(), Place("replica-0", "b"), False),
    ],
)
def test_workers_are_told_apart_by_their_ids_and_else_by_their_names(one, two, other):
    assert one.is_other(two) is two.is_other(one) is other
