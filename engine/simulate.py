"""A replica without a model: the same protocol, prefix cache, scheduling and KV events; tokens and time are made up.

Blocks are hashed, shared, evicted and published by the real pool, so what it says of cached tokens and what it tells
subscribers is what a real replica of this size would say. A step lasts as long as the cost model has it. Tokens are drawn by
digest of what stands before (engine.simulation.tokens): every simulated replica of one model name, block size and seed
generates the same ones. Temperature 0 ignores the seed; other shaping of the distribution (top_p, penalties, logit_bias) is
accepted and has no effect, since there is no distribution. Log-probabilities are refused, grammars too unless configured.

Imports no torch: it starts in no time.
"""

from __future__ import annotations

import secrets
from collections import abc

from tokenizers import Tokenizer

from engine.core import RequestRefused
from engine.resuming import replay
from engine.simulation.clock import Clock, MonotonicClock
from engine.simulation.config import SimulationConfig
from engine.simulation.scheduler import Batch, Scheduler, tokens_waiting
from engine.simulation.sequences import Prepared, Request, Sequence, prepare
from engine.simulation.sessions import SimulatedSessions
from engine.simulation.tiers import SimulatedTiers
from engine.simulation.tokens import TokenSource
from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    Capabilities,
    Chunk,
    Done,
    Finished,
    GenerateRequest,
    RetentionHint,
    Started,
    Tokens,
    WorkerInfo,
    WorkerStats,
)
from grammar.detokenizer import Detokenizer
from prefix_cache.chain_memory import ChainMemory
from prefix_cache.events import DEVICE, KVEvent
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import BlockHash, namespace_digest
from prefix_cache.worth import SUPERSEDED

_RATE_DECAY = 0.95


class SimulatedEngine:
    """An `EngineCore`. `tokenizer` is only needed for stop strings; `clock` may be virtual."""

    def __init__(
        self, config: SimulationConfig, *, clock: Clock | None = None, tokenizer: Tokenizer | None = None, instance: str = ""
    ) -> None:
        self.config = config
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._namespace = namespace_digest({"simulated": True, "model": config.model, "block_size": config.block_size})
        self._chains = ChainMemory(config.block_size)
        self._source = TokenSource(config.token_ids, config.eos_token_ids, config.mean_output_tokens)
        self._tiers: SimulatedTiers | None = None
        if config.offload is not None and config.offload.is_on and config.prefix_caching:
            self._tiers = SimulatedTiers(config, self._namespace, self._clock)
        self._scheduler = Scheduler(config, ExpectedUsePolicy(self._clock.now), self._tiers)
        self._sessions = SimulatedSessions(self._scheduler.pool, self._tiers, self._clock)
        self._requests: dict[str, Request] = {}
        self._batch: Batch | None = None
        self._deadline = 0.0
        self._info = WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            instance=instance or secrets.token_hex(16),
            model=config.model,
            namespace=self._namespace.hex(),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            max_concurrency=config.max_num_seqs,
            capabilities=Capabilities(
                grammars=config.accept_grammars,
                logprobs=False,
                retention_hints=True,
                supersede=True,
                prompt_prefixes=True,
                gather=True,
                resume=True,
            ),
            simulated=True,
        )
        self._over: list[Request] = []  # resumed with nothing left to generate: the next step says so
        self._order = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._aborted = 0
        self._prefill_rate = _Rate()
        self._decode_rate = _Rate()

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def prepare(self, request: GenerateRequest) -> Prepared:
        return prepare(request, self.config, self._namespace, self._chains, self._detokenizer is not None)

    def add(self, prepared: Prepared) -> None:
        if prepared.request_id in self._requests:
            message = f"A request with the id {prepared.request_id!r} is in flight; give every request an id of its own."
            raise RequestRefused("duplicate_request_id", message, "request_id")
        self._order += 1
        request = Request(prepared, self._clock.now(), self._order)
        if prepared.resumed:
            self._resume(request)
        else:
            request.sequences.append(Sequence(request, 0, self.config, self._detokenizer))
        self._requests[prepared.request_id] = request
        if request.sequences:
            self._scheduler.enqueue(request.sequences[0])
        else:
            self._over.append(request)

    def abort(self, request_id: str) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for sequence in request.sequences:
            self._scheduler.drop(sequence)
        request.sequences.clear()
        request.held.clear()
        self._aborted += 1
        return True

    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting or scheduler.loading or self._over) or self._has_news()

    def wakes_in(self) -> float | None:
        """Seconds after which `has_work` may be True though nothing happens; None: never."""
        return None if self._tiers is None else self._tiers.wakes_in()

    def interrupt(self) -> None:
        """From any thread: a `step` that waits returns; the next one goes on waiting for the same batch."""
        self._clock.interrupt()

    def step(self) -> list[tuple[str, Chunk]]:
        """Plans a batch unless one is under way, lets its time pass, and gives its tokens out. Empty when interrupted."""
        if self._batch is not None and not any(work.sequence.alive for work in self._batch.work):
            self._batch = None  # all of it was aborted
        if self._over:
            return self._end_over()
        if self._tiers is not None:
            self._tiers.look()
        if self._batch is None and not self._begin():
            return []
        if not self._clock.wait_until(self._deadline):
            return []
        return self._end()

    def stats(self) -> WorkerStats:
        pool = self._scheduler.pool
        return WorkerStats(
            instance=self._info.instance,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            waiting_prompt_tokens=tokens_waiting(self._scheduler.waiting),
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            steps_total=self._steps,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=self._scheduler.preemptions,
            requests_total=self._order,
            aborted_total=self._aborted,
            prefill_tokens_per_second=self._prefill_rate.value,
            decode_tokens_per_second=self._decode_rate.value,
            loading=len(self._scheduler.loading),
            lost_blocks_total=self._sessions.lost_blocks,
            prefetched_blocks_total=0 if self._tiers is None else self._tiers.prefetched,
            useless_prefetches_total=0 if self._tiers is None else self._tiers.useless_prefetches,
            tiers=() if self._tiers is None else self._tiers.stats(),
        )

    def take_events(self) -> list[KVEvent]:
        events = self._scheduler.pool.take_events()
        return events if self._tiers is None else [*events, *self._tiers.take_events()]

    def snapshot(self) -> dict[str, bytes]:
        digests = self._scheduler.pool.snapshot()
        tiers = {} if self._tiers is None else self._tiers.snapshot()
        return {DEVICE: digests, **tiers} if digests else tiers

    def retain(self, hints: abc.Iterable[RetentionHint]) -> None:
        for hint in hints:
            self._sessions.told(hint)

    def supersede(self, digests: abc.Sequence[BlockHash]) -> int:
        if self._tiers is not None:
            self._tiers.mark(digests, SUPERSEDED)
        return self._scheduler.pool.supersede(digests)

    def check_integrity(self) -> None:
        self._scheduler.pool.check_integrity(self._scheduler.held())

    def close(self) -> None:
        """Leaves the tiers. Idempotent."""
        if self._tiers is not None:
            self._tiers.close()

    def _has_news(self) -> bool:
        return self._tiers is not None and self._tiers.has_news

    def _begin(self) -> bool:
        """Plans a batch. False when there is none: nobody is there, or all who are wait for their blocks."""
        scheduler, now = self._scheduler, self._clock.now()
        scheduler.take_arrived(now)
        if not (scheduler.running or scheduler.waiting):
            if scheduler.loading:
                self._clock.wait_until(min(load.ready_at for load in scheduler.loading))
            return False
        self._batch = batch = scheduler.plan()
        if not batch.work:
            self._batch = None
            if not scheduler.loading:
                raise RuntimeError("the scheduler has sequences and runs none of them")
            self._clock.wait_until(min(load.ready_at for load in scheduler.loading))
            return False
        for work in batch.work:
            request = work.sequence.request
            if request.started_at is None:
                request.started_at = now
                request.cached_tokens = min(work.sequence.computed, request.prepared.prompt_tokens)
                self._prompt_tokens += request.prepared.prompt_tokens
                self._cached_tokens += request.cached_tokens
                held = request.cached_tokens // self.config.block_size
                self._sessions.began(request.prepared.session, work.sequence.digests, held)
        self._deadline = now + batch.seconds * self.config.time_scale
        return True

    def _end(self) -> list[tuple[str, Chunk]]:
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("a step ends that has not begun")
        now = self._clock.now()
        self._steps += 1
        self._prefill_rate.add(batch.prefill_tokens, batch.prefill_seconds, batch, self.config.time_scale)
        self._decode_rate.add(batch.decode_tokens, batch.decode_seconds, batch, self.config.time_scale)
        chunks: list[tuple[str, Chunk]] = []
        for work in batch.work:
            sequence = work.sequence
            if not sequence.alive:
                continue
            request = sequence.request
            if not request.announced:
                self._announce(request, chunks)
            sequence.computed += work.count
            self._scheduler.publish(sequence)
            if request.held and sequence.computed >= request.prepared.prompt_tokens:
                for held in request.held:
                    self._scheduler.enqueue(held)
                request.held.clear()
            if sequence.computed == len(sequence):
                for choice in (sequence, *self._fork(sequence)):
                    self._generate(choice, now, chunks)
        return chunks

    def _resume(self, request: Request) -> None:
        """Brings the choices of a request that another worker began to where they stood. Raises RequestRefused."""
        request.forked = True
        for index, (finished, token_ids) in enumerate(request.prepared.resumed):
            if finished:
                continue
            sequence = Sequence(request, index, self.config, self._detokenizer)
            decision = replay(index, token_ids, sequence.append)
            if decision is None:
                request.sequences.append(sequence)
            else:
                request.ended.append((index, decision))
        request.held = request.sequences[1:]

    def _end_over(self) -> list[tuple[str, Chunk]]:
        """Ends requests that were resumed when all of their choices had come to an end."""
        over, self._over = self._over, []
        chunks: list[tuple[str, Chunk]] = []
        for request in over:
            request_id = request.prepared.request_id
            if self._requests.get(request_id) is not request:
                continue  # aborted meanwhile
            del self._requests[request_id]
            self._announce(request, chunks)
            chunks.append((request_id, self._done(request, self._clock.now())))
        return chunks

    def _announce(self, request: Request, chunks: list[tuple[str, Chunk]]) -> None:
        request.announced = True
        chunks.append((request.prepared.request_id, self._started(request)))
        for index, decision in request.ended:
            finished = Finished(decision.finish_reason, index, decision.stop_reason)
            chunks.append((request.prepared.request_id, finished))

    def _started(self, request: Request) -> Started:
        queued = (request.started_at or request.arrived) - request.arrived
        return Started(request.prepared.prompt_tokens, request.cached_tokens, queued)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The other choices, once the first has computed the prompt. Returns those that run now."""
        request = sequence.request
        if request.forked:
            return []
        request.forked = True
        children = []
        for index in range(1, request.prepared.sampling.n):
            child = Sequence(request, index, self.config, self._detokenizer)
            request.sequences.append(child)
            self._scheduler.run_beside(sequence, child)
            if len(child.table):
                children.append(child)
        return children

    def _generate(self, sequence: Sequence, now: float, chunks: list[tuple[str, Chunk]]) -> None:
        request = sequence.request
        request_id = request.prepared.request_id
        sampling = request.prepared.sampling
        may_end = not sampling.ignore_eos and sequence.generated >= sampling.min_tokens
        digest = sequence.parent(len(sequence.digests))
        token = self._source.next(sequence.key, digest, sequence.tail(), may_end)
        decision = sequence.append(token)
        request.completion_tokens += 1
        self._generated_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = now
        chunks.append((request_id, Tokens((token,), sequence.index)))
        if decision is not None:
            chunks.append((request_id, Finished(decision.finish_reason, sequence.index, decision.stop_reason)))
            full = sequence.published
            self._scheduler.drop(sequence)
            request.sequences.remove(sequence)
            if not request.sequences:
                self._sessions.ended(request.prepared.session, sequence.digests[:full])
                del self._requests[request_id]
                chunks.append((request_id, self._done(request, now)))

    def _done(self, request: Request, now: float) -> Done:
        started = request.arrived if request.started_at is None else request.started_at
        first = now if request.first_token_at is None else request.first_token_at
        return Done(
            prompt_tokens=request.prepared.prompt_tokens,
            completion_tokens=request.completion_tokens,
            cached_tokens=request.cached_tokens,
            queue_seconds=started - request.arrived,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            preemptions=request.preemptions,
        )


class _Rate:
    """Tokens a second over the last steps, each counting less than the one after it."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float, batch: Batch, scale: float) -> None:
        """`tokens` that took `seconds` of a step, and their share of what the step costs in any case."""
        if tokens:
            variable = batch.prefill_seconds + batch.decode_seconds
            share = seconds / variable if variable else 1.0
            self._tokens = self._tokens * _RATE_DECAY + tokens
            self._seconds = self._seconds * _RATE_DECAY + (seconds + share * batch.step_seconds) * scale

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0
