"""The scheduler's decisions, without a model."""

import pytest
from engine_harness import random_prompt, wire

from engine.intake import Intake, Limits
from engine.kv_cache import KVCache
from engine.request import Status
from engine.scheduler import Scheduler
from prefix_cache.block_pool import BlockPool
from prefix_cache.chain_memory import ChainMemory

NAMESPACE = b"n" * 16


class Desk:
    """A scheduler, and the parts of an engine around it that need no model: each step computes what was planned and appends
    token 9 wherever one would be sampled."""

    def __init__(self, num_blocks=64, seqs=8, budget=32, policy="fcfs", caching=True):
        self.cache = KVCache(BlockPool(num_blocks, 4), caching=caching)
        self.scheduler = Scheduler(self.cache, max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.intake = Intake(
            limits=Limits(vocab_size=1000, max_model_len=1000, num_blocks=num_blocks, block_size=4, max_num_seqs=seqs),
            chains=ChainMemory(4),
            namespace=NAMESPACE,
            eos_token_ids=(2,),
            caching=caching,
            use_priority=policy == "priority",
            compile_grammar=None,
            detokenizer=None,
        )
        self.requests = {}

    def add(self, name, length, seed=None, **settings):
        prompt = random_prompt(len(self.requests) if seed is None else seed, length)
        request = self.intake.prepare(wire(name, prompt, **settings))
        request.arrival = len(self.requests)
        self.requests[name] = request
        self.scheduler.enqueue(request.sequences[0])
        return request

    def plan(self):
        plan = self.scheduler.schedule(0.0)
        assert sum(item.count for item in plan.scheduled) <= self.scheduler._max_num_batched_tokens
        self.cache.check_integrity(self.scheduler.running)
        return plan

    def step(self):
        """What was scheduled, by request."""
        plan = self.plan()
        for item in plan.scheduled:
            self.cache.advance(item.sequence, item.count)
        for item in plan.scheduled:
            sequence = item.sequence
            if not item.samples:
                continue
            if sequence.is_trunk:
                for sibling in sequence.request.sequences[1:]:
                    self.cache.fork(sequence, sibling)
                    self.scheduler.adopt(sibling)
                    sibling.output.append(9)
                sequence.request.forked = True
            sequence.output.append(9)
        self.cache.check_integrity(self.scheduler.running)
        counts = {}
        for item in plan.scheduled:
            counts.setdefault(item.sequence.request.request_id, []).append(item.count)
        return {name: count[0] if len(count) == 1 else count for name, count in counts.items()}, plan

    def names(self, sequences):
        return [sequence.request.request_id for sequence in sequences]


def test_a_long_prefill_is_cut_to_the_budget_and_decode_goes_first():
    desk = Desk(budget=16)
    desk.add("short", 5)
    assert desk.step()[0] == {"short": 5}
    desk.add("long", 40)
    assert desk.step()[0] == {"short": 1, "long": 15}
    assert desk.step()[0] == {"short": 1, "long": 15}
    assert desk.step()[0] == {"short": 1, "long": 10}
    assert desk.step()[0] == {"short": 1, "long": 1}


def test_the_next_in_the_queue_shares_the_step_in_which_a_prefill_ends():
    desk = Desk(budget=16)
    desk.add("first", 20)
    desk.add("second", 20)
    assert desk.step()[0] == {"first": 16}
    assert desk.step()[0] == {"first": 4, "second": 12}
    assert desk.step()[0] == {"first": 1, "second": 8}


def test_decode_keeps_its_token_when_an_earlier_prefill_could_use_the_whole_budget():
    desk = Desk(budget=8, seqs=4)
    first = desk.add("first", 40)
    desk.add("second", 3)
    desk.step()
    # Preempt the first by hand: it comes back in front of the second, which decodes by then.
    desk.scheduler._preempt(first.sequences[0])
    desk.cache.pool.clear()
    for _ in range(6):
        desk.step()
    assert desk.names(desk.scheduler.running) == ["first", "second"]
    second = desk.requests["second"].sequences[0]
    desk.scheduler._preempt(first.sequences[0])
    desk.cache.pool.clear()
    before = second.num_tokens
    assert desk.step()[0] == {"first": 7, "second": 1}
    assert second.num_tokens == before + 1


def test_first_come_first_served_without_overtaking():
    desk = Desk(seqs=2)
    for name in ("a", "b", "c"):
        desk.add(name, 4, priority=-5 if name == "c" else 0)
    desk.step()
    assert desk.names(desk.scheduler.running) == ["a", "b"]
    assert desk.names(desk.scheduler.waiting) == ["c"]
    desk.scheduler.finish(desk.requests["a"].sequences[0])
    desk.step()
    assert desk.names(desk.scheduler.running) == ["b", "c"]


def test_priority_goes_first_and_ties_by_arrival():
    desk = Desk(seqs=2, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        desk.add(name, 4, priority=priority)
    assert desk.names(desk.scheduler.waiting) == ["d", "b", "a", "c"]
    desk.step()
    assert desk.names(desk.scheduler.running) == ["d", "b"]


def test_a_big_request_that_does_not_fit_now_is_not_overtaken_by_small_ones():
    desk = Desk(num_blocks=10, budget=64)
    desk.add("running", 20)
    desk.step()
    desk.add("big", 30)
    desk.add("small", 1)
    assert desk.step()[0] == {"running": 1}
    assert desk.names(desk.scheduler.waiting) == ["big", "small"]


def test_out_of_blocks_preempts_the_lowest_rank_and_admits_nobody_in_that_step():
    desk = Desk(num_blocks=8, budget=64)
    for name in ("a", "b", "c"):
        desk.add(name, 4, max_tokens=20)
    desk.step()  # one block each; the second block of each comes with the fifth token
    desk.step()
    for _ in range(3):
        counts, plan = desk.step()
        assert plan.preempted == 0
        assert list(counts) == ["a", "b", "c"]
    counts, plan = desk.step()  # the ninth token: a and b take the last two blocks, c stands still and keeps its own
    assert (list(counts), plan.preempted) == (["a", "b"], 0)
    desk.add("d", 1)
    for _ in range(3):
        counts, plan = desk.step()
        assert (list(counts), plan.preempted) == (["a", "b"], 0)
    counts, plan = desk.step()  # the thirteenth token: now c's blocks are needed
    assert (list(counts), plan.preempted) == (["a", "b"], 1)
    assert plan.started == ()
    assert desk.names(desk.scheduler.waiting) == ["c", "d"]
    c = desk.requests["c"].sequences[0]
    assert c.status is Status.WAITING
    assert (c.computed, len(c.table)) == (0, 0)
    assert len(c.output) > 1
    assert c.request.preemptions == 1


def test_a_step_that_preempted_admits_nobody_even_where_there_is_room():
    desk = Desk(num_blocks=13, budget=64, policy="priority", caching=False)
    desk.add("a", 20, max_tokens=9)
    desk.add("c", 24, max_tokens=9, priority=5)
    desk.step()
    a, c = (desk.requests[name].sequences[0] for name in "ac")
    while desk.cache.pool.num_available or a.computed % 4:
        assert desk.step()[1].preempted == 0
    desk.add("d", 1, priority=1)  # goes before c
    counts, plan = desk.step()
    assert (counts, plan.preempted, plan.started) == ({"a": 1}, 1, ())
    assert c.status is Status.WAITING
    assert desk.cache.pool.num_available > 1
    assert desk.step()[0]["d"] == 1


def test_a_preempted_sequence_finds_its_prefix_again():
    desk = Desk(num_blocks=16)
    request = desk.add("a", 21)
    desk.step()
    desk.scheduler._preempt(request.sequences[0])
    counts, plan = desk.step()
    assert counts == {"a": 2}  # 22 tokens known, five full blocks found
    assert plan.started == ()
    assert request.cached_tokens == 0


def test_a_sequence_alone_with_the_pool_always_goes_on():
    desk = Desk(num_blocks=5, budget=8)
    desk.add("a", 12, max_tokens=9, seed=1)
    desk.add("b", 12, max_tokens=9, seed=2)
    a, b = (desk.requests[name].sequences[0] for name in "ab")
    for sequence in (a, b):
        for _ in range(200):
            if len(sequence.output) == 9:
                break
            desk.step()
        assert len(sequence.output) == 9
        desk.scheduler.finish(sequence)
    assert not desk.scheduler.has_work()
    assert desk.cache.pool.num_available == 5


def test_a_full_hit_leaves_the_last_token_to_compute():
    desk = Desk()
    desk.add("a", 16, seed=1)
    desk.step()
    second = desk.add("b", 16, seed=1)
    counts, plan = desk.step()
    assert counts["b"] == 4
    assert plan.started == (second,)
    assert second.cached_tokens == 12


def test_choices_share_the_prompt_and_copy_its_last_block_when_they_write():
    desk = Desk(num_blocks=32)
    request = desk.add("a", 6, n=3)
    desk.step()
    tables = [sequence.table.part(0) for sequence in request.sequences]
    assert tables[0] == tables[1] == tables[2]
    _, plan = desk.step()
    copies = [copy for item in plan.scheduled for copy in item.copies]
    assert len(copies) == 2, "the last one to write owns the block by then"
    assert {source for source, _ in copies} == {tables[0][1]}
    assert len({sequence.table[1] for sequence in request.sequences}) == 3
    assert len({sequence.table[0] for sequence in request.sequences}) == 1


def test_choices_count_as_sequences_before_they_exist():
    desk = Desk(seqs=4)
    desk.add("a", 4, n=3)
    desk.add("b", 4, n=2)
    desk.step()
    assert desk.names(desk.scheduler.running) == ["a", "a", "a"]
    desk.scheduler.finish(desk.requests["a"].sequences[1])
    counts, _ = desk.step()
    assert counts == {"a": [1, 1], "b": 4}


def test_a_waiting_request_leaves_room_for_what_runs():
    desk = Desk(num_blocks=7, budget=64)
    desk.add("a", 15)
    desk.step()
    desk.add("b", 11)  # three blocks are free, and a will soon want one of them
    assert desk.step()[0] == {"a": 1}
    desk.scheduler.finish(desk.requests["a"].sequences[0])
    assert desk.step()[0] == {"b": 11}


def test_finishing_while_waiting_and_twice():
    desk = Desk()
    request = desk.add("a", 4)
    desk.scheduler.finish(request.sequences[0])
    desk.scheduler.finish(request.sequences[0])
    assert not desk.scheduler.has_work()
    assert desk.scheduler.waiting_tokens == 0


def test_waiting_tokens():
    desk = Desk(seqs=1)
    desk.add("a", 4)
    desk.add("b", 7)
    assert desk.scheduler.waiting_tokens == 11
    desk.step()
    assert desk.scheduler.waiting_tokens == 7


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_published_can_be_found_only_with_caching(caching):
    desk = Desk(caching=caching)
    desk.add("a", 9)
    desk.step()
    assert len(desk.cache.pool.snapshot()) == (2 * 16 if caching else 0)


def test_decoding_sequences_that_share_a_prefix_stand_side_by_side():
    desk = Desk(budget=64)
    for number in range(3):  # two families, by turns: a0 b0 a1 b1 a2 b2
        for family in (0, 1):
            desk.add(f"{'ab'[family]}{number}", 9, seed=family)
            desk.step()  # computed, so that the next of its family finds its blocks
    desk.add("late", 20, seed=9)
    plan = desk.plan()
    names = desk.names(item.sequence for item in plan.scheduled)
    assert names[0] == "late"
    assert sorted((names[1:4], names[4:])) == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    firsts = [item.sequence.table[0] for item in plan.scheduled[1:]]
    assert firsts[0] == firsts[1] == firsts[2] != firsts[3]
