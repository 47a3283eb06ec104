import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.telemetry.tallies import CounterFamily, HistogramFamily, Level

LABELS = st.tuples(st.sampled_from(["chat", 'a "b"\n']), st.sampled_from(["m", "other"]))
BUCKETS = (0.0, 0.005, 0.1, 1.0, 10.0)
AMOUNTS = st.one_of(st.sampled_from([0.0, 0.005, 0.1, 1.0, 10.0, 1e9, float("inf")]), st.floats(0, 100))


def exposition(registry):
    """Without the times at which children came into being."""
    return [
        line if line.startswith("#") or "_created" not in line else line.rsplit(" ", 1)[0]
        for line in generate_latest(registry).decode().splitlines()
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(LABELS, AMOUNTS), max_size=20))
def test_a_scrape_reads_as_if_the_library_had_counted(seen):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    names = ("operation", "model")
    counter, their_counter = CounterFamily("turns", "Turns", names, ours), Counter("turns", "Turns", names, registry=theirs)
    histogram = HistogramFamily("wait_seconds", "A wait", names, ours, buckets=BUCKETS)
    their_histogram = Histogram("wait_seconds", "A wait", names, buckets=BUCKETS, registry=theirs)
    plain = CounterFamily("plain", "One", (), ours).labels()
    their_plain = Counter("plain", "One", registry=theirs)
    alone = HistogramFamily("alone", "One", (), ours, buckets=BUCKETS).labels()
    their_alone = Histogram("alone", "One", buckets=BUCKETS, registry=theirs)
    level, their_level = Level("in_flight", "Now", ours), Gauge("in_flight", "Now", registry=theirs)
    for labels, amount in seen:
        counter.labels(*labels).inc(amount)
        their_counter.labels(*labels).inc(amount)
        for one in (histogram.labels(*labels), their_histogram.labels(*labels), alone, their_alone):
            one.observe(amount)
        for one in (plain, their_plain, level, their_level):
            one.inc()
    if seen:
        level.dec()
        their_level.dec()
    assert exposition(ours) == exposition(theirs)


def test_names_that_are_taken_and_labels_that_are_missing_are_errors():
    registry = CollectorRegistry()
    family = CounterFamily("turns", "Turns", ("model",), registry)
    with pytest.raises(ValueError, match="turns_total"):
        HistogramFamily("turns_total", "Turns", (), registry, buckets=BUCKETS)
    with pytest.raises(ValueError, match="'model'"):
        family.labels()


def test_children_say_when_they_came_into_being():
    registry = CollectorRegistry()
    Counter("theirs", "x", registry=registry)
    CounterFamily("ours", "x", (), registry)
    created = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_created")
    }
    assert created["ours_created"] == pytest.approx(created["theirs_created"], abs=60)
