from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workers.books import InFlight
from gateway.workers.breaker import Breaker


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_books_are_the_sum_of_what_is_open(data):
    books = InFlight()
    leases = []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["open", "cached", "running", "close"]))
        if action == "open":
            prompt = data.draw(st.integers(0, 1000))
            matched = data.draw(st.integers(0, 1200))
            leases.append([books.open(prompt, matched), prompt, max(prompt - matched, 0), "waiting"])
        elif leases:
            entry = data.draw(st.sampled_from(leases))
            if action == "cached":
                cached = data.draw(st.integers(0, 1200))
                entry[0].cached(cached)
                if entry[3] == "waiting":
                    entry[2] = max(entry[1] - cached, 0)
            elif action == "running":
                entry[0].running()
                entry[3] = "running" if entry[3] == "waiting" else entry[3]
            else:
                entry[0].close()
                entry[3] = "closed"
        waiting = [entry for entry in leases if entry[3] == "waiting"]
        assert books.waiting == len(waiting)
        assert books.running == sum(entry[3] == "running" for entry in leases)
        assert books.queued_tokens == sum(entry[2] for entry in waiting)
        assert books.waiting_prompt_tokens == sum(entry[1] for entry in waiting)
    for entry in leases:
        entry[0].close()
    assert books == InFlight()


def test_a_breaker_opens_after_a_few_failures_in_a_row_and_forgives():
    breaker = Breaker(threshold=3, first=1.0, longest=4.0)
    breaker.failed(0)
    breaker.failed(0)
    breaker.succeeded()
    breaker.failed(0)
    breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.sent(1.0)
    assert not breaker.allows(1.1)
    breaker.succeeded()
    assert breaker.allows(1.1)
    assert breaker.failures == 0


def test_each_failed_trial_doubles_the_pause_up_to_the_longest():
    breaker = Breaker(threshold=1, first=1.0, longest=4.0)
    now, pauses = 0.0, []
    for _ in range(5):
        breaker.failed(now)
        opened = now
        while not breaker.allows(now):
            now += 0.25
        pauses.append(now - opened)
        breaker.sent(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.allows(now + 1.0)


def test_a_death_with_many_streams_is_one():
    breaker = Breaker(threshold=3, first=1.0, longest=30.0)
    for _ in range(40):
        breaker.failed(5.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.0)
    breaker.sent(6.0)
    breaker.failed(6.1)  # the trial
    assert not breaker.allows(8.0)
    assert breaker.allows(8.1)


def test_a_trial_without_an_end_does_not_shut_the_worker_out_for_ever():
    breaker = Breaker(threshold=1, first=1.0, longest=4.0)
    breaker.failed(0)
    breaker.sent(1.0)
    assert not breaker.allows(2.0)
    assert breaker.allows(5.5)
