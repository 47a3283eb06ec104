from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.router.rendezvous import prompt_key, score, session_key

parts = st.text(max_size=8)


def chosen(key, workers):
    return max(workers, key=lambda worker: (score(key, worker), worker))


@given(st.tuples(parts, parts), st.tuples(parts, parts))
def test_two_sessions_never_have_one_key(one, other):
    assert (session_key(one) == session_key(other)) == (one == other)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8), st.tuples(parts, parts), st.data())
def test_a_worker_that_goes_moves_its_own_sessions_only(workers, session, data):
    key = session_key(session)
    gone = data.draw(st.sampled_from(sorted(workers)))
    before, after = chosen(key, workers), chosen(key, workers - {gone})
    assert before in (after, gone)


def test_sessions_spread_evenly():
    workers = [f"w{number}" for number in range(8)]
    counts = Counter(chosen(session_key(("t", f"s-{number}")), workers) for number in range(8000))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_prompts_are_known_by_where_they_end_within_their_tenant():
    assert prompt_key("t", []) is None
    assert prompt_key("t", [b"a", b"b"]) != prompt_key("t", [b"a", b"c"])
    assert prompt_key("t", [b"a"]) != prompt_key("u", [b"a"])
