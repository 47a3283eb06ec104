"""Random request mixes on a pool of a few blocks: everybody gets the tokens of the undisturbed engine, and no block is lost.

In float64, so that rounding, which differs with the shape of a batch, cannot turn a near tie.
"""

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt
from hypothesis import given, settings

from engine.models.registry import load_model
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored
from prefix_cache.hashing import split_digests

STEM = random_prompt(0, 40)


@dataclass(frozen=True)
class Ask:
    stem: int  # tokens of the shared stem
    own: int  # tokens after it
    variant: int
    max_tokens: int
    n: int
    priority: int
    salt: str | None
    temperature: float
    penalty: float

    @property
    def prompt(self):
        return STEM[: self.stem] + random_prompt(1 + self.variant, self.own)

    @property
    def settings(self):
        return {
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "seed": 7,
            "presence_penalty": self.penalty,
            "repetition_penalty": 1.0 + self.penalty / 4,
        }


asks = st.builds(
    Ask,
    stem=st.sampled_from([0, 4, 9, 16]),
    own=st.integers(1, 8),
    variant=st.integers(0, 2),
    max_tokens=st.integers(1, 30),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.integers(0, 2),
    salt=st.sampled_from([None, None, "a", "b"]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    penalty=st.sampled_from([0.0, 0.0, 1.5]),
)
arrivals = st.lists(st.tuples(st.integers(0, 4), asks), min_size=4, max_size=12)
aborts = st.dictionaries(st.integers(0, 11), st.integers(0, 40), max_size=3)


@pytest.fixture(scope="module")
def undisturbed(tiny_checkpoint):
    """ask -> tokens of its choices, each request alone in an engine with room and without a prefix cache."""
    model = load_model(tiny_checkpoint("mistral", sliding_window=11, num_hidden_layers=2), dtype=torch.float64)
    known = {}

    def tokens(ask):
        key = (tuple(ask.prompt), *ask.settings.values())
        if key not in known:
            known[key] = generate(make_engine(model, prefix_caching=False), ask.prompt, **ask.settings)
        return known[key]

    return model, tokens


class Subscriber:
    """What somebody believes who only hears the events."""

    def __init__(self):
        self.digests = set()

    def hear(self, engine):
        for event in engine.take_events():
            match event:
                case BlocksStored(digests=joined):
                    assert not self.digests & set(split_digests(joined))
                    self.digests |= set(split_digests(joined))
                case BlocksRemoved(digests=joined):
                    assert self.digests >= set(split_digests(joined))
                    self.digests -= set(split_digests(joined))
                case AllCleared():
                    self.digests.clear()
        assert self.digests == set(split_digests(engine.snapshot()["device"]))


mixes = st.fixed_dictionaries(
    {
        "arrivals": arrivals,
        "aborts": aborts,
        "engine": st.fixed_dictionaries(
            {
                "num_blocks": st.integers(14, 20),
                "max_num_batched_tokens": st.integers(6, 40),
                "max_num_seqs": st.integers(3, 6),
                "prefix_caching": st.booleans(),
                "policy": st.sampled_from(["fcfs", "priority"]),
            }
        ),
    }
)


def play(engine, arrivals, aborts):
    """Adds, steps and aborts as told; returns what came out and which requests were aborted."""
    driver, subscriber = Driver(engine), Subscriber()
    due = {f"r{index}": step for index, step in aborts.items()}
    aborted, step, arrival = set(), 0, 0
    pending = []
    for index, (gap, ask) in enumerate(arrivals):
        arrival += gap
        pending.append((arrival, f"r{index}", ask))
    while pending or engine.has_work():
        while pending and (pending[0][0] <= step or not engine.has_work()):
            _, request_id, ask = pending.pop(0)
            driver.add(request_id, ask.prompt, priority=ask.priority, cache_salt=ask.salt, **ask.settings)
        for request_id in [name for name, at in due.items() if at <= step]:
            if engine.abort(request_id):
                aborted.add(request_id)
                engine.check_integrity()
            if request_id in aborted or request_id in driver.seen:
                del due[request_id]
        if engine.has_work():
            chunks = driver.step()
            assert not aborted & {request_id for request_id, _ in chunks}
            subscriber.hear(engine)
            step += 1
            assert step < 3000, "the engine does not come to an end"
    driver.assert_idle()
    return driver.seen, aborted


def check(seen, ask, expected, caching):
    assert seen.failed is None
    assert [seen.tokens[choice] for choice in range(ask.n)] == expected
    assert {choice: end.finish_reason for choice, end in seen.finished.items()} == dict.fromkeys(range(ask.n), "length")
    assert seen.done.completion_tokens == ask.n * ask.max_tokens
    assert seen.done.cached_tokens == seen.started.cached_tokens < len(ask.prompt)
    assert seen.done.cached_tokens == 0 or caching


def test_random_mixes(undisturbed):
    model, expected = undisturbed
    totals = Counter()

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(mix=mixes)
    def run(mix):
        engine = make_engine(model, **mix["engine"])
        seen, aborted = play(engine, mix["arrivals"], mix["aborts"])
        for index, (_, ask) in enumerate(mix["arrivals"]):
            name = f"r{index}"
            if name in aborted:
                for choice, tokens in seen[name].tokens.items():
                    assert tokens == expected(ask)[choice][: len(tokens)]
            else:
                check(seen[name], ask, expected(ask), mix["engine"]["prefix_caching"])
        stats = engine.stats()
        totals.update(preemptions=stats.preemptions_total, hits=stats.cached_tokens_total, aborts=stats.aborted_total)

    run()
    assert min(totals["preemptions"], totals["hits"], totals["aborts"]) > 10, f"the mixes were too easy: {totals}"


def test_salted_prefixes_are_not_shared(undisturbed):
    model, _ = undisturbed
    driver = Driver(make_engine(model))
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", None), ("d", "one")):
        driver.add(request_id, STEM, cache_salt=salt)
        driver.run()
    assert [driver.seen[name].done.cached_tokens for name in "abcd"] == [0, 0, 0, 36]
