from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.access.entries import PRIORITY_CLASSES
from gateway.admission.config import AdmissionConfig
from gateway.admission.fair_queue import FairQueue, Waiting


def queue(size=1000, max_tokens=10**9):
    return FairQueue(size, max_tokens, AdmissionConfig().weight)


def turn(tenant="a", *, cost=100, priority="normal", continuing=False, tokens=100):
    return Waiting(tenant, priority, continuing, tokens, cost)


def drain(fair, count=None):
    taken = []
    while (head := fair.head()) is not None and (count is None or len(taken) < count):
        fair.take(head)
        taken.append(head)
    return taken


def test_turns_of_a_tenant_go_in_order():
    fair = queue()
    turns = [turn() for _ in range(5)]
    for each in turns:
        assert fair.push(each) == []
    assert drain(fair) == turns


def test_a_tenant_that_floods_waits_for_its_own():
    fair = queue()
    for _ in range(100):
        fair.push(turn("noisy"))
    quiet = [turn(f"quiet-{number}") for number in range(4)]
    for each in quiet:
        fair.push(each)
    first = drain(fair, 6)
    assert set(quiet) <= set(first)


def test_shares_are_by_work_not_by_turns():
    fair = queue()
    for _ in range(100):
        fair.push(turn("short", cost=100))
        fair.push(turn("long", cost=1000))
    counts = [each.tenant for each in drain(fair, 44)]
    assert (counts.count("short"), counts.count("long")) == (40, 4)


def test_who_was_away_has_saved_nothing():
    fair = queue()
    for _ in range(50):
        fair.push(turn("busy"))
    drain(fair, 40)
    for _ in range(20):
        fair.push(turn("late"))
    tenants = [each.tenant for each in drain(fair, 10)]
    assert 4 <= tenants.count("late") <= 6


def test_sessions_in_progress_go_before_new_ones_of_their_class():
    fair = queue()
    births = [turn("a"), turn("b")]
    ongoing = [turn("a", continuing=True), turn("b", continuing=True)]
    for each in (*births, *ongoing):
        fair.push(each)
    assert drain(fair) == [*ongoing, *births]


def test_classes_share_by_weight_and_none_stands_still():
    fair = queue()
    for _ in range(210):
        for priority in PRIORITY_CLASSES:
            fair.push(turn(priority=priority))
    counts = [each.priority for each in drain(fair, 210)]
    assert [counts.count(priority) for priority in PRIORITY_CLASSES] == [160, 40, 10]


def test_a_full_class_drops_the_newest_birth_of_who_has_most():
    fair = queue(size=4)
    noisy = [turn("noisy") for _ in range(3)]
    quiet = turn("quiet")
    for each in (*noisy, quiet):
        assert fair.push(each) == []
    assert fair.push(turn("other")) == [noisy[2]]
    late = turn("noisy")
    assert fair.push(late) == [late]
    # A turn of a session in progress pushes out births, whoever sent them.
    ongoing = turn("noisy", continuing=True)
    assert fair.push(ongoing) == [noisy[1]]
    # Other classes are not concerned.
    assert fair.push(turn("noisy", priority="high")) == []


def test_sessions_in_progress_are_only_dropped_when_there_are_no_births():
    fair = queue(size=2)
    low = [turn("x", priority="low"), turn("x", priority="low")]
    ongoing = [turn("a", continuing=True), turn("a", continuing=True), turn("b", continuing=True), turn("b", continuing=True)]
    for each in (*low, *ongoing):
        assert fair.push(each) == []
    # The class is full, and what it has is more than its own room: a birth does not come in.
    birth = turn("c")
    assert fair.push(birth) == [birth]
    assert fair.push(turn("c", continuing=True)) == [low[1]]
    assert fair.push(turn("d", continuing=True)) == [low[0]]
    assert fair.push(turn("e", continuing=True)) == [ongoing[1]]


def test_prompts_that_wait_are_bounded_over_all_classes():
    fair = queue(max_tokens=1000)
    low = turn("a", priority="low", tokens=400)
    high = turn("b", priority="high", tokens=400)
    fair.push(low)
    fair.push(high)
    assert fair.push(turn("c", tokens=400)) == [low]
    # One that is larger than the bound alone may still wait, when nobody else does.
    alone = queue(max_tokens=10)
    assert alone.push(turn(tokens=100)) == []


def test_the_wait_of_a_quiet_tenant_is_not_that_of_the_noisy_one():
    fair = queue()
    for _ in range(100):
        fair.push(turn("noisy", cost=10))
    assert fair.ahead_of("noisy", "normal", continuing=False) == 1000
    assert fair.ahead_of("quiet", "normal", continuing=False) == 10
    fair.push(turn("quiet", cost=10))
    assert fair.ahead_of("quiet", "normal", continuing=False) == 10 + 20
    assert fair.ahead_of("noisy", "normal", continuing=False) == 1000 + 10
    assert fair.ahead_of("noisy", "normal", continuing=True) == 0


class Queueing(RuleBasedStateMachine):
    """Any mix of arrivals, departures and service: bounds hold, books balance, and nobody is overtaken without end."""

    SIZE, TOKENS = 6, 2000

    def __init__(self):
        super().__init__()
        self.fair = queue(self.SIZE, self.TOKENS)
        self.model = []
        self.overtaken = {}

    @rule(
        tenant=st.sampled_from("abc"),
        cost=st.integers(1, 300),
        priority=st.sampled_from(PRIORITY_CLASSES),
        continuing=st.booleans(),
        tokens=st.integers(1, 600),
    )
    def push(self, tenant, cost, priority, continuing, tokens):
        new = turn(tenant, cost=cost, priority=priority, continuing=continuing, tokens=tokens)
        before = list(self.model)
        self.model.append(new)
        for dropped in self.fair.push(new):
            if dropped.continuing:
                assert all(each.continuing for each in self.model), "a birth stays while it goes"
            self.model.remove(dropped)
            self.overtaken.pop(dropped, None)
        assert set(self.model) <= {*before, new}

    @rule(data=st.data())
    def leave(self, data):
        if self.model:
            gone = data.draw(st.sampled_from(self.model))
            self.fair.remove(gone)
            self.fair.remove(gone)
            self.model.remove(gone)
            self.overtaken.pop(gone, None)

    @rule()
    def serve(self):
        head = self.fair.head()
        assert (head is None) == (not self.model)
        if head is None:
            return
        assert self.fair.head() is head
        if not head.continuing:
            assert not any(each.continuing and each.priority == head.priority for each in self.model)
        self.fair.take(head)
        self.model.remove(head)
        self.overtaken.pop(head, None)
        for each in self.model:
            # Only what goes before births by rule may pass them without end.
            if each.continuing or not any(other.continuing and other.priority == each.priority for other in self.model):
                self.overtaken[each] = self.overtaken.get(each, 0) + head.cost
        # Each of 3 tenants may have 300 before it in its lane, and the least class gets a 21st of the work.
        assert max(self.overtaken.values(), default=0) <= 21 * (3 * 300 + 3 * self.SIZE * 300)

    @invariant()
    def books_balance(self):
        assert len(self.fair) == len(self.model)
        assert self.fair.tokens == sum(each.tokens for each in self.model)
        assert self.fair.tokens <= self.TOKENS
        assert len(self.model) <= 3 * self.SIZE
        for priority in PRIORITY_CLASSES:
            mine = [each for each in self.model if each.priority == priority]
            assert self.fair.depth(priority) == len(mine)
            assert len(mine) <= self.SIZE or all(each.continuing for each in mine)
            assert self.fair.tenants(priority) == {
                tenant: sum(each.tenant == tenant for each in mine) for tenant in {each.tenant for each in mine}
            }
            for tenant in "abc":
                assert self.fair.ahead_of(tenant, priority, continuing=True) <= sum(each.cost for each in self.model) + 1e-6


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_memory_of_tenants_is_bounded():
    fair = queue()
    for number in range(20_000):
        fair.push(turn(f"tenant-{number}"))
        drain(fair)
    lane = fair._classes["normal"].births
    assert len(lane._flows) <= 5000
