import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, Heartbeat, Snapshot
from prefix_cache.hashing import JoinedDigests, join_digests
from prefix_cache.index import TIERS, Hits, Outcome, Position, ResidencyIndex

ROOT = b"r" * 16
DIGESTS = [bytes([n]) * 16 for n in range(24)]
WORKERS = ("a", "b", "c")

digest_lists = st.lists(st.sampled_from(DIGESTS), max_size=8, unique=True)


def stored(digests, tier="device"):
    return BlocksStored(join_digests(digests), ROOT, tier)


def removed(digests, tier="device"):
    return BlocksRemoved(join_digests(digests), tier)


def naive_prefix(held, digests):
    count = 0
    for digest in digests:
        if digest not in held:
            break
        count += 1
    return count


class IndexModel(RuleBasedStateMachine):
    """The index beside sets of (digest, tier) and of predicted digests per worker."""

    walked = 1000

    def prompts(self, rng):
        return DIGESTS, DIGESTS[::-1], rng.sample(DIGESTS, 10), []

    def __init__(self):
        super().__init__()
        self.index = ResidencyIndex(max_blocks=1000, max_predicted_blocks=1000, walked=self.walked)
        self.held = {}
        self.expected = {}
        self.position = {}
        self.open = []
        self.now = 0.0

    def _forget(self, worker):
        self.held[worker] = set()
        self.expected[worker] = set()
        for prediction in [p for p in self.open if p[1] == worker]:
            prediction[3].clear()

    @rule(worker=st.sampled_from(WORKERS), life=st.integers(1, 3), seq=st.integers(0, 5), data=st.data())
    def snapshot(self, worker, life, seq, data):
        tiers = data.draw(st.dictionaries(st.sampled_from(TIERS), digest_lists, max_size=3))
        message = Snapshot(f"life-{life}", seq, {tier: join_digests(digests) for tier, digests in tiers.items()})
        assert self.index.apply(worker, message) is Outcome.APPLIED
        self._forget(worker)
        self.held[worker] = {(digest, tier) for tier, digests in tiers.items() for digest in digests}
        self.position[worker] = (f"life-{life}", seq)

    @rule(
        worker=st.sampled_from(WORKERS),
        life=st.integers(1, 3),
        step=st.sampled_from([-1, 0, 1, 1, 1, 1, 2]),
        events=st.lists(
            st.tuples(st.sampled_from(["stored", "removed", "cleared"]), digest_lists, st.sampled_from(TIERS)), max_size=4
        ),
        same_life=st.sampled_from([True, True, True, False]),
    )
    def batch(self, worker, life, step, events, same_life):
        known = self.position.get(worker)
        instance = known[0] if known and same_life else f"life-{life}"
        seq = max(1, (known[1] if known else 0) + step)
        made = tuple(
            stored(d, t) if kind == "stored" else removed(d, t) if kind == "removed" else AllCleared() for kind, d, t in events
        )
        outcome = self.index.apply(worker, EventBatch(instance, seq, made))
        if known is None or known[0] != instance:
            if known is not None or self.held.get(worker):
                self._forget(worker)
            self.held.setdefault(worker, set())
            self.expected.setdefault(worker, set())
            known = (instance, 0) if seq == 1 else None
            self.position[worker] = known
        if known is None or seq > known[1] + 1:
            assert outcome is Outcome.GAP
            return
        if seq <= known[1]:
            assert outcome is Outcome.DUPLICATE
            return
        assert outcome is Outcome.APPLIED
        self.position[worker] = (instance, seq)
        for kind, digests, tier in events:
            if kind == "stored":
                self.held[worker] |= {(digest, tier) for digest in digests}
            elif kind == "removed":
                self.held[worker] -= {(digest, tier) for digest in digests}
                self.expected[worker] -= set(digests)
            else:
                self._forget(worker)

    @rule(worker=st.sampled_from(WORKERS), ahead=st.integers(-1, 1))
    @precondition(lambda self: any(self.position.values()))
    def heartbeat(self, worker, ahead):
        known = self.position.get(worker)
        if known is None:
            return
        outcome = self.index.apply(worker, Heartbeat(known[0], known[1] + ahead))
        assert outcome is (Outcome.APPLIED if ahead == 0 else Outcome.GAP if ahead > 0 else Outcome.DUPLICATE)

    @rule(worker=st.sampled_from(WORKERS))
    def remove_worker(self, worker):
        self.index.remove_worker(worker)
        self._forget(worker)
        self.position.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), digests=digest_lists)
    def predict(self, worker, digests):
        prediction = self.index.predict(worker, digests)
        if worker not in self.position:
            assert prediction is None
            return
        held = {digest for digest, _ in self.held[worker]} | self.expected[worker]
        added = set(digests) - held
        assert (prediction is not None) == bool(added)
        if prediction is not None:
            self.expected[worker] |= added
            self.open.append([prediction, worker, None, added])

    @rule(data=st.data(), how=st.sampled_from(["settle", "retract"]))
    @precondition(lambda self: self.open)
    def end_prediction(self, data, how):
        entry = data.draw(st.sampled_from(self.open))
        if how == "settle":
            if entry[2] is None:
                entry[2] = self.now + 5
                self.index.settle(entry[0], entry[2])
        else:
            self.index.retract(entry[0])
            self.index.retract(entry[0])
            self.open.remove(entry)
            self.expected[entry[1]] = self.expected.get(entry[1], set()) - entry[3]

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds):
        self.now += seconds
        self.index.expire(self.now)
        for entry in [e for e in self.open if e[2] is not None and e[2] <= self.now]:
            self.open.remove(entry)
            self.expected[entry[1]] = self.expected.get(entry[1], set()) - entry[3]

    @rule(limit=st.one_of(st.none(), st.integers(0, 5)))
    def sweep(self, limit):
        self.index.sweep(limit)

    @invariant()
    def same_answers(self):
        rng = random.Random(len(self.open))
        for prompt in self.prompts(rng):
            expected = {}
            for worker in WORKERS:
                held = {d for d, _ in self.held.get(worker, ())} | self.expected.get(worker, set())
                if count := naive_prefix(held, prompt):
                    expected[worker] = count
            assert self.index.lookup(prompt) == expected
        for worker in WORKERS:
            assert self.index.blocks(worker) == len({d for d, _ in self.held.get(worker, ())})
            known = self.position.get(worker)
            assert self.index.position(worker) == (Position(*known) if known else None)
            for digest in DIGESTS[:4]:
                assert self.index.tiers(worker, digest) == tuple(t for t in TIERS if (digest, t) in self.held.get(worker, ()))
        assert self.index.predicted_blocks == sum(len(e[0].digests) for e in self.open)


IndexModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestIndexModel = IndexModel.TestCase


def fresh(count, seed=0):
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def test_after_everybody_is_gone_nothing_stays_in_memory():
    index = ResidencyIndex()
    for number in range(200):
        name = f"worker-{number % 7}"
        index.apply(name, Snapshot(f"life-{number}", 1, {"device": join_digests(fresh(50, number))}))
        assert index.predict(name, fresh(10, 1000 + number)) is not None
    for number in range(7):
        index.remove_worker(f"worker-{number}")
    index.sweep(None)
    assert len(index) == 0


def test_restarts_do_not_pile_up_dead_blocks_or_slots():
    index = ResidencyIndex()
    sizes = []
    for life in range(300):
        index.apply("w", Snapshot(f"life-{life}", 1, {"device": join_digests(fresh(500, life))}))
        sizes.append(len(index))
    assert max(sizes) <= 3 * 500
    assert index.blocks("w") == 500
    assert index._next_slot <= 64


def test_a_worker_that_never_removes_anything_is_bounded():
    index = ResidencyIndex(max_blocks=100)
    digests = fresh(250)
    assert index.apply("w", EventBatch("i", 1, (stored(digests),))) is Outcome.APPLIED
    assert index.blocks("w") == len(index) == 100
    assert index.evicted == 150
    # What is kept is the beginning of the chain, where prefixes start.
    assert index.lookup(digests) == {"w": 100}
    # A block that is already known gains a tier, and room made by removals is used again.
    index.apply("w", EventBatch("i", 2, (stored(digests[:1], "host"),)))
    assert index.tiers("w", digests[0]) == ("device", "host")
    index.apply("w", EventBatch("i", 3, (removed(digests[50:100]), stored(digests[200:210]))))
    assert index.blocks("w") == 60


def test_the_least_recently_used_blocks_of_all_workers_go_first():
    index = ResidencyIndex(max_blocks=300)
    prompts = [fresh(60, seed) for seed in range(5)]
    for number, prompt in enumerate(prompts):
        index.apply(f"w{number % 2}", EventBatch("i", 1 + number // 2, (stored(prompt, "host" if number == 1 else "device"),)))
    index.touch(prompts[0])
    index.apply("w1", EventBatch("i", 3, (stored(fresh(60, 9)),)))
    # The second prompt was used least recently, the first again; the end of it would go before its beginning.
    assert index.lookup(prompts[1]) == {}
    assert index.lookup(prompts[0]) == {"w0": 60}
    assert len(index) == index.blocks("w0") + index.blocks("w1") <= 300
    index.apply("w1", EventBatch("i", 4, (stored(fresh(30, 10)),)))
    (held,) = index.lookup(prompts[2]).values()
    assert 20 <= held <= 40
    assert index.lookup_tiers(prompts[2])[1] == {}


def test_random_churn_of_many_workers_keeps_the_books():
    index = ResidencyIndex(max_blocks=500)
    rng = random.Random(3)
    for step in range(400):
        name = f"w{rng.randrange(5)}"
        if rng.random() < 0.05:
            index.remove_worker(name)
        elif rng.random() < 0.2:
            index.predict(name, fresh(rng.randrange(1, 40), rng.randrange(60)))
        else:
            tiers = {tier: join_digests(fresh(rng.randrange(60), rng.randrange(60))) for tier in ("device", "host")}
            index.apply(name, Snapshot(f"i{step}", 1, tiers))
        assert len(index) <= 500
    for number in range(5):
        name = f"w{number}"
        slot = index._slots.get(name)
        masks = [mask >> slot.shift & 31 for mask in index._masks.values()] if slot else []
        assert index.blocks(name) == sum(mask & 15 > 0 for mask in masks)
        assert index._lower_blocks == sum(each.lower for each in index._slots.values())
        assert slot is None or slot.lower == sum((mask >> 1 & 7).bit_count() for mask in masks)


def test_predictions_are_bounded_and_the_oldest_make_room():
    index = ResidencyIndex(max_predicted_blocks=100)
    index.apply("w", Snapshot("i", 0, {}))
    first, second, third = fresh(60, 1), fresh(40, 2), fresh(50, 3)
    old = index.predict("w", first)
    index.predict("w", second)
    assert index.lookup(first) == {"w": 60}
    index.predict("w", third)
    assert index.lookup(first) == {}
    assert index.lookup(second) == {"w": 40}
    assert index.lookup(third) == {"w": 50}
    assert index.predicted_blocks == 90
    index.retract(old)
    assert index.predicted_blocks == 90
    huge = fresh(1000, 4)
    index.predict("w", huge)
    assert index.lookup(huge) == {"w": 193}
    assert index.predicted_blocks == 100


def test_a_prediction_outlives_neither_its_worker_nor_its_life():
    index = ResidencyIndex()
    index.apply("w", Snapshot("i", 0, {}))
    digests = fresh(5)
    prediction = index.predict("w", digests)
    index.remove_worker("w")
    index.sweep(None)
    # Another worker gets the same slot; the old prediction must not take anything from it.
    index.apply("x", Snapshot("j", 0, {}))
    index.predict("x", digests)
    index.retract(prediction)
    assert index.lookup(digests) == {"x": 5}


def test_confirmed_blocks_stay_when_their_prediction_ends():
    index = ResidencyIndex()
    index.apply("w", Snapshot("i", 0, {}))
    digests = fresh(5)
    prediction = index.predict("w", digests)
    index.apply("w", EventBatch("i", 1, (stored(digests[:3]),)))
    index.settle(prediction, 10.0)
    index.expire(9.9)
    assert index.lookup(digests) == {"w": 5}
    index.expire(10.0)
    assert index.lookup(digests) == {"w": 3}


def test_a_snapshot_in_steps_shows_what_is_loaded_and_survives_being_given_up():
    index = ResidencyIndex()
    digests = fresh(100)
    steps = index.load_snapshot("w", Snapshot("i", 7, {"device": join_digests(digests)}), chunk_blocks=10)
    next(steps)
    next(steps)
    assert index.lookup(digests) == {"w": 20}
    assert index.position("w") is None
    steps.close()
    assert index.apply("w", EventBatch("i", 8, (stored(fresh(1, 9)),))) is Outcome.GAP
    for _ in index.load_snapshot("w", Snapshot("i", 7, {"device": join_digests(digests)}), chunk_blocks=30):
        pass
    assert index.lookup(digests) == {"w": 100}
    assert index.position("w") == Position("i", 7)
    stale = index.load_snapshot("w", Snapshot("i", 8, {"device": join_digests(digests)}), chunk_blocks=10)
    next(stale)
    index.apply("w", Snapshot("i2", 3, {"host": join_digests(digests[:4])}))
    for _ in stale:
        pass
    assert index.position("w") == Position("i2", 3)
    assert index.lookup(digests) == {"w": 4}


def test_unknown_tiers_are_left_out():
    index = ResidencyIndex()
    index.apply("w", EventBatch("i", 1, (stored(DIGESTS[:3], "tape"), stored(DIGESTS[:2], "disk"))))
    assert index.lookup(DIGESTS) == {"w": 2}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 69), st.integers(0, 40)), min_size=1, max_size=70, unique_by=lambda item: item[0]),
    st.randoms(use_true_random=False),
)
def test_many_workers(depths, rng):
    index = ResidencyIndex()
    digests = fresh(40, 5)
    for worker, depth in depths:
        order = digests[:depth]
        rng.shuffle(order)
        index.apply(f"w{worker}", EventBatch("i", 1, (stored(order), stored(fresh(2, 100 + worker)))))
    assert index.lookup(digests) == {f"w{worker}": depth for worker, depth in depths if depth}


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError, match="at least one block"):
        ResidencyIndex(max_blocks=0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.integers(0, 400), st.booleans())
def test_leaps_find_what_walking_finds(depths, length, joined):
    digests = fresh(400, 5)
    leaping, walking = ResidencyIndex(walked=0), ResidencyIndex(walked=1000)
    for number, depth in enumerate(depths):
        tiers = {"device": join_digests(digests[: depth // 2]), "host": join_digests(digests[depth // 3 : depth])}
        for index in (leaping, walking):
            index.apply(f"w{number}", Snapshot("i", 1, tiers if number % 2 else {"device": join_digests(digests[:depth])}))
    prompt = digests[:length] + fresh(20, 6)
    asked = JoinedDigests(join_digests(prompt)) if joined else prompt
    found, lower = leaping.lookup_tiers(asked)
    assert found == {f"w{n}": min(depth, length) for n, depth in enumerate(depths) if min(depth, length)}
    assert (found, lower) == walking.lookup_tiers(prompt)
    for name, hits in lower.items():
        depth = depths[int(name[1:])]
        assert hits == Hits(min(depth // 2, length), min(depth, length) - min(depth // 2, length), 0, 0)
    for number, depth in enumerate(depths):
        assert leaping.reported(f"w{number}", asked, length) == min(depth, length)


def test_hits_are_told_apart_by_tier():
    index = ResidencyIndex()
    digests = fresh(100)
    tiers = {"device": digests[:30], "host": digests[20:60], "disk": digests[60:80], "remote": digests[:90]}
    index.apply("w", Snapshot("i", 1, {tier: join_digests(held) for tier, held in tiers.items()}))
    index.apply("x", Snapshot("i", 1, {"device": join_digests(digests[:50])}))
    index.predict("w", digests, 90)
    assert index.lookup_tiers(digests) == ({"w": 100, "x": 50}, {"w": Hits(30, 30, 20, 10)})
    assert index.reported("w", digests, 100) == 90
    index.apply("w", EventBatch("i", 2, (removed(digests, "host"), removed(digests, "disk"), removed(digests, "remote"))))
    assert index.lookup_tiers(digests) == ({"w": 30, "x": 50}, {})


def test_a_cache_with_holes_is_walked_once_that_is_known():
    index = ResidencyIndex()
    digests = fresh(400)
    index.apply("w", Snapshot("i", 1, {"device": join_digests(digests[:110] + digests[120:])}))
    assert index.lookup(digests) == {"w": 400}
    assert index.check_order("w", digests[:100])
    assert index.check_order("w", digests[:115])  # what is missing at the end was given up, as it should be
    assert index.check_order("w", fresh(50, 9))
    assert index.lookup(digests) == {"w": 400}
    assert not index.check_order("w", digests)
    assert index.lookup(digests) == {"w": 110}
    # Another life of it is taken at its word again.
    index.apply("w", Snapshot("i2", 1, {"device": join_digests(digests)}))
    assert index._careful_ones == 0
    assert index.check_order("nobody", digests)


def test_a_long_prediction_stands_on_few_blocks():
    index = ResidencyIndex()
    index.apply("w", Snapshot("i", 0, {}))
    digests = fresh(6250)
    prediction = index.predict("w", digests)
    assert index.lookup(digests) == {"w": 6250}
    assert index.predicted_blocks < 300
    # Who shares a beginning finds it but for what lies between two leaps.
    assert index.lookup(digests[:3000] + fresh(100, 1)) == {"w": 2977}
    assert index.lookup(digests[:90]) == {"w": 90}
    index.retract(prediction)
    assert len(index) == 0


def test_the_new_end_of_a_long_prompt_stands_on_few_blocks_too():
    index = ResidencyIndex()
    digests = fresh(6250)
    index.apply("w", Snapshot("i", 0, {"device": join_digests(digests[:6186])}))
    prediction = index.predict("w", digests, 6186)
    assert index.predicted_blocks <= 4
    assert index.lookup(digests) == {"w": 6250}
    assert index.reported("w", digests, 6250) == 6186
    # The turn after it, before its events have come: less than a leap is missing.
    assert 6250 - 32 < index.lookup(digests + fresh(64, 1))["w"] <= 6250
    index.apply("w", EventBatch("i", 1, (stored(digests[6186:]),)))
    assert index.lookup(digests + fresh(64, 1)) == {"w": 6250}
    index.retract(prediction)
    assert index.lookup(digests) == {"w": 6250}
    assert index.predicted_blocks == 0


def test_what_is_only_expected_is_no_sign_of_a_cache_with_holes():
    index = ResidencyIndex()
    digests = fresh(400)
    index.apply("w", Snapshot("i", 0, {"device": join_digests(digests[:300])}))
    index.apply("w", EventBatch("i", 1, (removed(digests[100:300]),)))
    index.predict("w", digests, 100)
    assert index.check_order("w", digests)
    index.apply("w", EventBatch("i", 2, (stored(digests[200:300]),)))
    assert not index.check_order("w", digests)


def test_a_cache_with_holes_is_told_of_every_block_of_a_short_new_end():
    index = ResidencyIndex()
    digests = fresh(400)
    index.apply("w", Snapshot("i", 0, {"device": join_digests(digests[:150] + digests[160:350])}))
    assert not index.check_order("w", digests)
    index.apply("w", EventBatch("i", 1, (stored(digests[150:160]),)))
    index.predict("w", digests, 350)
    # Its prompts are walked block by block.
    assert index.lookup(digests[:390] + fresh(5, 1)) == {"w": 390}
