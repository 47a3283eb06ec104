"""One replica on a virtual clock: the engine's block pool and its way of batching, with steps that last as long as a cost
model says.

One token budget a step; running sequences first, in the order in which they came, then waiting ones as long as their prompt
and answer fit into the blocks that are left (so that nothing is ever preempted). Steps that only generate are taken together
until something changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prefix_cache.block_pool import BlockPool
from prefix_cache.hashing import BlockHash, JoinedDigests


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds: of a step; of a prompt token and of a pair of one with one before it; of a sequence that generates and of each
    token before. The defaults are about an 8B model on one 80 GB GPU, those of `turnkeep engine --simulate`."""

    step: float = 0.006
    prefill_token: float = 4e-5
    prefill_pair: float = 1.3e-9
    decode_sequence: float = 4e-5
    decode_context_token: float = 5e-8


@dataclass(slots=True, eq=False)
class Job:
    """A request on a replica. Times are the clock's; -1: not yet."""

    digests: JoinedDigests
    prompt_tokens: int
    output_tokens: int
    arrived: float
    cached_tokens: int = 0
    started_at: float = -1.0
    first_token_at: float = -1.0
    computed: int = 0
    generated: int = 0
    published: int = 0
    table: list[int] = field(default_factory=list)
    blocks: list[BlockHash] = field(default_factory=list)

    @property
    def context(self) -> int:
        return self.computed + self.generated


@dataclass(slots=True)
class Changes:
    """What a step has brought about."""

    started: list[Job] = field(default_factory=list)
    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    generated: int = 0


class SimulatedReplica:
    """Give it jobs; while it is busy, call `end_step` at `step_ends` and `begin_step` after that."""

    def __init__(self, name: str, num_blocks: int, block_size: int, costs: StepCosts, *, budget: int = 8192) -> None:
        self.name = name
        self.pool = BlockPool(num_blocks, block_size)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.step_ends = 0.0
        self.busy = False
        self.busy_seconds = 0.0
        self._size = block_size
        self._costs = costs
        self._budget = budget
        self._work: list[tuple[Job, int]] = []
        self._began = 0.0
        self._each = 0.0
        self._steps = 1
        self._fresh: list[Job] = []

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: Job, now: float) -> bool:
        """Takes a job. True: the step that is under way ends sooner than was said, as the job must get its turn."""
        if self._blocks(job) > self.pool.num_blocks:
            raise ValueError(f"a request of {job.prompt_tokens} tokens does not fit into {self.pool.num_blocks} blocks")
        self.waiting.append(job)
        if self.busy and self._steps > 1:
            done = min(self._steps, int((now - self._began) / self._each) + 1)
            if done < self._steps:
                self._steps = done
                self.step_ends = self._began + done * self._each
                return True
        return False

    def begin_step(self, now: float) -> bool:
        """Plans the next step. False: there is nothing to do."""
        budget = self._budget
        work: list[tuple[Job, int]] = []
        for job in self.running:
            left = job.prompt_tokens - job.computed
            count = min(left, budget) if left else 1
            if count > 0:
                work.append((job, count if left else 0))
                budget -= count
        while self.waiting and budget > 0 and self._admit(self.waiting[0], now):
            job = self.waiting.popleft()
            count = min(job.prompt_tokens - job.computed, budget)
            work.append((job, count))
            budget -= count
        self._work = work
        self.busy = bool(work)
        if not work:
            return False
        costs, seconds, prefills = self._costs, self._costs.step, 0
        for job, count in work:
            if count:
                prefills += 1
                seconds += count * (costs.prefill_token + costs.prefill_pair * (job.computed + count / 2))
            else:
                seconds += costs.decode_sequence + costs.decode_context_token * job.context
        self._steps = 1 if prefills else min(job.output_tokens - job.generated for job, _ in work)
        self._began, self._each = now, seconds
        self.step_ends = now + self._steps * seconds
        return True

    def end_step(self, now: float) -> Changes:
        """The step is over: `now` is when it was to end."""
        changes = Changes(started=self._fresh)
        self._fresh = []
        self.busy_seconds += now - self._began
        for job, count in self._work:
            if count:
                job.computed += count
                self._publish(job)
                if job.computed < job.prompt_tokens:
                    continue
                job.first_token_at = now
                job.generated = 1
                changes.first_tokens.append(job)
                changes.generated += 1
            else:
                job.generated += self._steps
                changes.generated += self._steps
            if job.generated >= job.output_tokens:
                self.pool.free(job.table)
                self.running.remove(job)
                changes.finished.append(job)
        self._work = []
        self.busy = False
        return changes

    def _admit(self, job: Job, now: float) -> bool:
        blocks = list(job.digests)
        found = self.pool.lookup(blocks[: (job.prompt_tokens - 1) // self._size])
        if self._blocks(job) - len(found) > self.pool.num_available - self.pool.unreferenced(found):
            return False
        self.pool.touch(found)
        job.blocks = blocks
        job.table = found + self.pool.allocate(self._blocks(job) - len(found))
        job.published = len(found)
        job.computed = job.cached_tokens = len(found) * self._size
        job.started_at = now
        self.running.append(job)
        self._fresh.append(job)
        return True

    def _publish(self, job: Job) -> None:
        full = min(job.computed // self._size, len(job.blocks))
        first = job.published
        if full > first:
            parent = job.blocks[first - 1] if first else bytes(16)
            job.table[first:full] = self.pool.publish(job.table[first:full], job.blocks[first:full], parent)
            job.published = full

    def _blocks(self, job: Job) -> int:
        return -(-(job.prompt_tokens + job.output_tokens) // self._size)
