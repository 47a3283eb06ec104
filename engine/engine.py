"""The engine: an `EngineCore` that runs a model. Requests in, one batch a step, chunks out.

A step: the scheduler plans it and reserves blocks; the runner computes it; blocks that it filled are published; the sampler
chooses a token for every sequence whose known tokens are all computed; the tokens are appended, and what ended gives its
blocks back. Between two steps every running sequence is consistent, so a request can be dropped there at any moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from engine.batch import build_batch
from engine.cancelling import CancellableForward, ForwardCancelledError, StepCancelling
from engine.choosing import Chooser
from engine.config import EngineConfig
from engine.decode_graphs import DecodeGraphs, GraphCapture
from engine.forward import Forward
from engine.identity import namespace_of, worker_info
from engine.in_flight import InFlight
from engine.intake import Intake, Limits
from engine.kv_bytes import block_shape, device_blocks
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.masks import StepMasks
from engine.memory import available_memory
from engine.meter import Meter
from engine.models.registry import LoadedModel
from engine.offloading import Offloading
from engine.output import Addressed, StepOutput
from engine.request import Request
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler, StepPlan
from engine.session_blocks import SessionBlocks
from engine.session_door import SessionDoor
from engine.session_scheduling import DoorFigures, SessionScheduling
from engine.speculation.drafts import Drafter
from engine.speculation.speculator import Speculator
from engine.warm_up import warm_up
from gateway.workers.protocol import (
    GenerateRequest,
    RetentionHint,
    StartupSeconds,
    WorkerInfo,
    WorkerStats,
)
from grammar.compiler import GrammarCompiler
from grammar.detokenizer import Detokenizer
from offload.config import OffloadConfig
from offload.estimate import PrefillCost
from offload.files import Files
from offload.stack import open_tiers
from prefix_cache.block_pool import BlockPool, IntegrityError
from prefix_cache.chain_memory import ChainMemory
from prefix_cache.events import DEVICE, KVEvent
from prefix_cache.eviction import EvictionPolicy
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import BlockHash, namespace_digest
from prefix_cache.worth import SUPERSEDED

logger = logging.getLogger(__name__)

_NOTHING_TO_DO = 0.001
_MOSTLY = 8  # tokens of prompts for each generated one, from which on a step's time is theirs


class Engine:
    """See `engine.core.EngineCore` for who may call what from where. `engine.loading.load_engine` makes one of a directory."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        *,
        num_blocks: int,
        max_model_len: int,
        forward: Forward,
        sampler: Sampler,
        grammars: GrammarCompiler | None = None,
        detokenizer: Detokenizer | None = None,
        drafters: Sequence[Drafter] | None = None,
        eviction: EvictionPolicy | None = None,
        graph_capture: GraphCapture | None = None,
        offload: OffloadConfig | None = None,
        tiers: Callable[[BlockPool], Offloading] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` and `max_model_len` are decided (engine.kv_memory); those of `config` are not looked at.

        graph_capture: what captures decode steps, at the warm-up; the KV memory then has one block more, which the pool does
        not know. None: every step runs eagerly.

        drafters: who guesses tokens, one asked after the other (None: n-grams of the sequence alone). grammars and detokenizer
        (an empty one) are None for a model without a tokenizer. offload: the tiers below the device; tiers: what
        makes them otherwise. files: what the disk tier asks of the system (None: just that).
        Raises ValueError for a model whose KV cannot be paged (engine.kv_layout.KVLayout), and TierUnavailable for a codec that
        does not fit its KV.
        """
        spec = model.spec
        self.config = config
        self._clock = clock
        self._grammars = grammars
        self._sampler = sampler
        layout = KVLayout.of(model, config.block_size, config.kv_dtype)
        sizes = [size for size in config.graph_batch_sizes if size <= config.max_num_seqs]
        kv = layout.allocate(num_blocks if graph_capture is None or not sizes else num_blocks + 1)
        if graph_capture is None or not sizes:
            self._runner = Runner(forward, kv)
        else:
            self._runner = Runner(forward, kv, DecodeGraphs(forward, kv, graph_capture, sizes, max_model_len))
        self._meter = Meter()
        self._cancelling = StepCancelling()
        if isinstance(forward, CancellableForward):
            forward.cancel_by(self._cancelling.flag)
        namespace = namespace_of(model, layout, config.block_size)
        self._tiers: Offloading | None = None
        pool = BlockPool(num_blocks, config.block_size, eviction or ExpectedUsePolicy(clock))
        if offload is not None and offload.is_on and config.prefix_caching:
            shape = block_shape(layout)
            # What computed a block decides on its last bits, and blocks may outlive this process.
            computed_by = namespace_digest({"namespace": namespace.hex(), "forward": type(forward).__qualname__})
            stack = open_tiers(offload, computed_by, shape, config.model_name or config.model.name, available_memory, files)
            self._tiers = Offloading.over(stack, pool, device_blocks(kv), offload, shape, clock)
        elif tiers is not None:
            self._tiers = tiers(pool)
        self._prefill = PrefillCost() if self._tiers is None else self._tiers.prefill
        self._sessions = SessionBlocks(pool, self._tiers, clock=clock)
        self._prefetching = self._sessions.prefetching
        self._cache = KVCache(pool, caching=config.prefix_caching, keep_filled=self._tiers is not None)
        self._speculator = Speculator(config.max_draft_tokens, config.max_draft_batch, drafters)
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tiers=self._tiers,
            give_way=None if self._prefetching is None else self._prefetching.give_way,
            speculator=self._speculator,
        )
        self._ordering: SessionScheduling | None = None
        if config.policy == "sessions" and config.prefix_caching and config.door is not None:
            door = SessionDoor(config.door, self._capacity, self._seconds_of)
            self._ordering = SessionScheduling(door, self._scheduler, self._sessions, config.block_size, clock)
        self._in_flight = InFlight(config, self._scheduler, self._cache, self._sessions, self._meter, clock, self._ordering)
        self._masks = StepMasks(spec.vocab_size, layout.device)
        self._chooser = Chooser(sampler, self._masks, self._in_flight, self._speculator, self._meter)
        self._intake = Intake(
            limits=Limits(spec.vocab_size, max_model_len, num_blocks, config.block_size, config.max_num_seqs),
            namespace=namespace,
            chains=ChainMemory(config.block_size),
            eos_token_ids=spec.eos_token_ids,
            caching=config.prefix_caching,
            use_priority=config.policy == "priority",
            compile_grammar=None if grammars is None else grammars.compile,
            detokenizer=detokenizer,
        )
        self._info = worker_info(
            config,
            namespace,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            grammars=grammars is not None,
        )

    @property
    def info(self) -> WorkerInfo:
        return self._info

    @property
    def forward_seconds(self) -> float:
        """Time spent in the forward pass so far; what a step takes beside it is the engine's own."""
        return self._runner.forward_seconds

    @property
    def mask_seconds(self) -> float:
        """What masks have taken of the engine thread's time; what was done beside forward passes is not in it."""
        return self._masks.seconds

    def warm_up(self) -> None:
        """A pass that leaves no trace, before the first request (engine.warm_up). Raises RuntimeError after one was added."""
        if self._in_flight.arrivals:
            raise RuntimeError("warm_up comes before the first request: its KV would overwrite that of cached blocks")
        pool, info = self._cache.pool, self._info
        warm_up(self._runner, self._sampler, pool.num_blocks, info.block_size, info.max_model_len)
        self._runner.capture_graphs()

    def started_in(self, seconds: StartupSeconds) -> None:
        """What `info` says of the start; before it is first read by others."""
        self._info = msgspec.structs.replace(self._info, startup=seconds)

    def prepare(self, request: GenerateRequest) -> Request:
        """Checks a request, compiles its grammar and names its blocks. From any thread. Raises RequestRefused."""
        return self._intake.prepare(request)

    def add(self, prepared: Request) -> None:
        """Queues a prepared request. Raises RequestRefused when its id is in use."""
        self._sessions.arrives(prepared.session)
        self._in_flight.add(prepared)

    def abort(self, request_id: str) -> bool:
        """Drops a request at once and gives its blocks back. False when it is not known."""
        self._cancelling.dropped(request_id)
        aborted = self._in_flight.abort(request_id)
        self._speculator.forget_idle()
        return aborted

    def cancel(self, request_id: str) -> None:
        """From any thread: an abort of this request is about to be asked for. A step that is for nobody else ends early."""
        self._cancelling.leaving(request_id)

    def has_work(self) -> bool:
        fetching = self._prefetching is not None and self._prefetching.is_due()
        return self._has_runnable() or self._in_flight.has_over or fetching

    def wakes_in(self) -> float | None:
        """Seconds after which `has_work` may be True though nothing happens; None: never."""
        fetching = None if self._prefetching is None else self._prefetching.due_in()
        return min((wait for wait in (self._door_opens_in(), fetching) if wait is not None), default=None)

    def drain(self) -> None:
        """Nothing new will come: who waits for others to make room need not any more."""
        if self._ordering is not None:
            self._ordering.open()

    def on_news(self, callback: Callable[[], None]) -> None:
        """`callback` is called on other threads when what `has_work` and `take_events` say may have changed without a step."""
        if self._tiers is not None:
            self._tiers.on_news(callback)

    def wait_for_tiers(self, timeout: float) -> bool:
        """Waits until no block is on its way to or from a tier. False when that took longer."""
        return self._tiers is None or self._tiers.wait_idle(timeout)

    def step(self) -> list[Addressed]:
        """Runs one batch. What goes wrong in one request fails that request; what goes wrong in the batch fails those in it."""
        output = StepOutput()
        self._in_flight.end_over(output)
        if self._prefetching is not None:
            self._prefetching.work()
        if self._has_runnable():
            self._step(output)
            self._speculator.forget_idle()
        return output.chunks

    def stats(self) -> WorkerStats:
        pool, totals = self._cache.pool, self._meter.totals
        door = DoorFigures() if self._ordering is None else self._ordering.figures()
        return WorkerStats(
            instance=self._info.instance,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + door.held,
            waiting_prompt_tokens=self._scheduler.waiting_tokens + door.held_tokens,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            generated_tokens_total=totals.generated_tokens,
            preemptions_total=totals.preemptions,
            drafted_tokens_total=self._speculator.tally.drafted,
            accepted_tokens_total=self._speculator.tally.accepted,
            forced_tokens_total=totals.forced_tokens,
            decode_passes_total=totals.decode_passes,
            mask_seconds_total=self._masks.seconds,
            drafts=self._speculator.tally.whole(),
            drafters=self._speculator.tally.each(),
            requests_total=totals.requests,
            aborted_total=totals.aborted,
            prefill_tokens_per_second=self._meter.prefill.value,
            decode_tokens_per_second=self._meter.decode.value,
            loading=len(self._scheduler.loading),
            lost_blocks_total=self._sessions.lost_blocks,
            prefetched_blocks_total=0 if self._tiers is None else self._tiers.prefetched,
            useless_prefetches_total=0 if self._tiers is None else self._tiers.useless_prefetches,
            fetched_blocks_total=0 if self._prefetching is None else self._prefetching.counts.fetched,
            useful_fetches_total=0 if self._prefetching is None else self._prefetching.counts.useful,
            useless_fetches_total=0 if self._prefetching is None else self._prefetching.counts.useless,
            held=door.held,
            held_prompt_tokens=door.held_tokens,
            held_blocks=door.held_blocks,
            sessions_in_progress=door.in_progress,
            sessions_paused=door.paused,
            held_total=door.held_total,
            pauses_total=door.pauses_total,
            tiers=() if self._tiers is None else self._tiers.stats(),
        )

    def take_events(self) -> list[KVEvent]:
        events = self._cache.pool.take_events()
        return events if self._tiers is None else [*events, *self._tiers.take_events()]

    def snapshot(self) -> dict[str, bytes]:
        tiers = {} if self._tiers is None else self._tiers.snapshot()
        return {DEVICE: self._cache.pool.snapshot(), **tiers}

    def supersede(self, digests: Sequence[BlockHash]) -> int:
        if self._tiers is not None:
            self._tiers.mark(digests, SUPERSEDED)
        return self._cache.pool.supersede(digests)

    def retain(self, hints: Iterable[RetentionHint]) -> None:
        for hint in hints:
            if self._ordering is None or self._ordering.told(hint):
                self._sessions.told(hint)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the pool's references are exactly those of sequences that run or load and of fetches,
        and the books of drafters balance."""
        fetched = () if self._prefetching is None else self._prefetching.held
        self._cache.check_integrity((*self._scheduler.running, *self._scheduler.loading), fetched)
        self._speculator.check_integrity()
        if self._ordering is not None:
            self._ordering.check_integrity()

    def clear_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep what they have."""
        self._cache.pool.clear()

    def close(self) -> None:
        """Ends what the grammar compiler keeps running, and leaves the tiers. Idempotent."""
        if self._prefetching is not None:
            self._prefetching.close()
        self._masks.close()
        if self._tiers is not None:
            self._tiers.close()
        if self._grammars is not None:
            self._grammars.close()

    def _has_runnable(self) -> bool:
        if self._scheduler.has_work() or (self._tiers is not None and self._tiers.has_arrived):
            return True
        return self._door_opens_in() == 0

    def _door_opens_in(self) -> float | None:
        return None if self._ordering is None else self._ordering.due_in(self._clock(), idle=self._is_idle())

    def _is_idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting or self._scheduler.loading)

    def _capacity(self) -> int:
        """Blocks that device and tiers hold: what the largest does, since what lies below lies above as well at first."""
        below = 0 if self._tiers is None else self._tiers.capacity
        return max(self._cache.pool.num_blocks, below)

    def _seconds_of(self, first: int, last: int) -> float:
        """Seconds of computing these blocks of a sequence, as measured."""
        return self._prefill.seconds(first * self.config.block_size, (last - first) * self.config.block_size)

    def _step(self, output: StepOutput) -> None:
        began = self._clock()
        if self._ordering is not None:
            self._ordering.before_step(began, idle=self._is_idle())
        plan = self._scheduler.schedule(began)
        totals = self._meter.totals
        totals.preemptions += plan.preempted
        for request in plan.started:
            totals.prompt_tokens += request.prompt_tokens
            totals.cached_tokens += request.cached_tokens
            self._sessions.began(request.session, request.sequences[0].digests, request.cached_tokens // self.config.block_size)
            if self._ordering is not None:
                self._ordering.began(request)
            output.started(request)
            for sequence, decision in request.ended:
                output.finished(request, sequence.index, decision)
        if not plan.scheduled:
            # Blocks are being loaded, and nobody can go on without them.
            time.sleep(_NOTHING_TO_DO)
            return
        totals.steps += 1
        before = totals.generated_tokens
        try:
            logits = self._compute(plan)
            self._chooser.choose(logits, output)
        except ForwardCancelledError:
            return  # nothing of it counts, and whoever it was for is dropped before the next step
        except IntegrityError:
            raise  # the books are wrong: nothing that goes on from here can be trusted
        except Exception as error:
            logger.exception("a step failed; the %d sequences in it are dropped", len(plan.scheduled))
            message = f"The step that computed this request failed: {error or type(error).__name__}"
            for item in plan.scheduled:
                self._in_flight.fail(item.sequence.request, "engine_error", message, output)
            return
        prefilled = sum(item.count for item in plan.scheduled if item.is_prefill)
        decoded = sum(not item.is_prefill for item in plan.scheduled)
        totals.decode_passes += decoded
        if decoded:
            # Guesses that came true and forced tokens are tokens as well.
            first = sum(item.sequence.slots for item in plan.scheduled if item.is_prefill and item.samples)
            decoded = max(totals.generated_tokens - before - first, decoded)
        seconds = self._clock() - began
        self._meter.step(prefilled, decoded, seconds)
        if not prefilled:
            self._speculator.stepped(seconds, decoded, len(plan.scheduled))
        if self._ordering is not None:
            self._ordering.worked(seconds)
        if self._tiers is not None:
            self._tiers.store(self._cache.take_filled())
        if prefilled > _MOSTLY * decoded:
            self._prefill.took([(item.start, item.count) for item in plan.scheduled if item.is_prefill], seconds)

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        """The logits of the plan's sampling sequences, one row each, in the plan's order."""
        batch = build_batch(plan.scheduled, self.config.block_size, self._runner.device)
        ends = batch.query_start_list[1:]
        rows = [
            row
            for item, end in zip(plan.scheduled, ends, strict=True)
            if item.samples
            for row in range(end - 1 - (item.count - item.known), end)
        ]
        copies = [copy for item in plan.scheduled for copy in item.copies]
        self._chooser.begin(plan)
        self._cancelling.begin(item.sequence.request.request_id for item in plan.scheduled)
        if self._tiers is not None:
            self._tiers.computing(True)
        try:
            logits = self._runner.run(batch, rows, copies)
        except BaseException:
            self._chooser.give_up()
            raise
        finally:
            self._cancelling.end()
            if self._tiers is not None:
                self._tiers.computing(False)
        for item in plan.scheduled:
            self._in_flight.computed(item.sequence, item.known)
            item.sequence.request.decode_passes += not item.is_prefill
        return logits
