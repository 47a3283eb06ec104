"""The engine: an `EngineCore` that runs a model. Requests in, one batch a step, chunks out.

A step: the scheduler plans it and reserves blocks; the runner computes it; blocks that it filled are published; the sampler
chooses a token for every sequence whose known tokens are all computed; the tokens are appended, and what ended gives its
blocks back. Between two steps every running sequence is consistent, so a request can be dropped there at any moment.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from engine.batch import build_batch
from engine.cancelling import CancellableForward, ForwardCancelledError, StepCancelling
from engine.choosing import Choosing, rows_of
from engine.config import EngineConfig
from engine.core import RequestRefused
from engine.decode_graphs import DecodeGraphs, GraphCapture
from engine.forward import Forward
from engine.intake import Intake, Limits
from engine.kv_bytes import block_shape, device_blocks
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.meter import Meter
from engine.models.registry import LoadedModel
from engine.offloading import Offloading
from engine.output import Addressed, StepOutput
from engine.request import MAX_FORCED, ForbiddenTokenError, Request, Sequence, Status
from engine.runner import Runner
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduler import Scheduler, StepPlan
from engine.session_blocks import SessionBlocks
from engine.speculation.speculator import Drafter, Speculator
from engine.warm_up import warm_up
from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    Capabilities,
    GenerateRequest,
    RetentionHint,
    StartupSeconds,
    WorkerInfo,
    WorkerStats,
)
from grammar.compiler import GrammarCompiler, allocate_bitmask, only_token
from grammar.detokenizer import Detokenizer
from offload.config import OffloadConfig
from offload.stack import open_tiers
from prefix_cache.block_pool import BlockPool, IntegrityError
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
        drafter: Drafter | None = None,
        eviction: EvictionPolicy | None = None,
        graph_capture: GraphCapture | None = None,
        offload: OffloadConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` and `max_model_len` are decided (engine.kv_memory); those of `config` are not looked at.

        graph_capture: what captures decode steps, at the warm-up; the KV memory then has one block more, which the pool does
        not know. None: every step runs eagerly.

        drafter: what guesses tokens (None: the sequence's own n-grams). grammars and detokenizer (an empty one) are None for a
        model without a tokenizer. offload: the tiers below the device.
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
        self._requests: dict[str, Request] = {}
        self._over: list[Request] = []  # resumed with nothing left to generate: the next step says so
        self._arrivals = 0
        namespace = namespace_digest(
            # The fingerprint covers weights, rope settings and whatever else of the model shapes its KV.
            {
                "weights": model.fingerprint,
                "dtype": str(model.decoder.dtype),
                "kv_dtype": str(layout.dtype),
                "block_size": config.block_size,
            }
        )
        name = config.model_name or config.model.name
        self._tiers: Offloading | None = None
        pool = BlockPool(num_blocks, config.block_size, eviction or ExpectedUsePolicy(clock))
        if offload is not None and offload.is_on and config.prefix_caching:
            shape = block_shape(layout)
            # What computed a block decides on its last bits, and blocks may outlive this process.
            computed_by = namespace_digest({"namespace": namespace.hex(), "forward": type(forward).__qualname__})
            stack = open_tiers(offload, computed_by, shape, name)
            self._tiers = Offloading(stack, pool, device_blocks(kv), offload, shape, clock)
        self._sessions = SessionBlocks(pool, self._tiers, clock=clock)
        self._prefetching = self._sessions.prefetching
        self._cache = KVCache(pool, caching=config.prefix_caching, keep_filled=self._tiers is not None)
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tiers=self._tiers,
            give_way=None if self._prefetching is None else self._prefetching.give_way,
            speculator=Speculator(config.max_draft_tokens, config.max_draft_batch, spec.vocab_size, drafter),
        )
        self._intake = Intake(
            limits=Limits(spec.vocab_size, max_model_len, num_blocks, config.block_size, config.max_num_seqs),
            namespace=namespace,
            eos_token_ids=spec.eos_token_ids,
            caching=config.prefix_caching,
            use_priority=config.policy == "priority",
            compile_grammar=None if grammars is None else grammars.compile,
            detokenizer=detokenizer,
        )
        self._info = WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            instance=secrets.token_hex(16),
            model=name,
            namespace=namespace.hex(),
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            max_concurrency=config.max_num_seqs,
            capabilities=Capabilities(
                grammars=grammars is not None,
                kv_events=config.prefix_caching,
                retention_hints=True,
                supersede=True,
                prompt_prefixes=True,
                resume=True,
            ),
        )

    @property
    def info(self) -> WorkerInfo:
        return self._info

    @property
    def forward_seconds(self) -> float:
        """Time spent in the forward pass so far; what a step takes beside it is the engine's own."""
        return self._runner.forward_seconds

    def warm_up(self) -> None:
        """A pass that leaves no trace, before the first request (engine.warm_up). Raises RuntimeError after one was added."""
        if self._arrivals:
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
        if prepared.request_id in self._requests:
            raise RequestRefused(
                "duplicate_request_id",
                f"A request with the id {prepared.request_id!r} is in flight; give every request an id of its own.",
                "request_id",
            )
        prepared.added_at = self._clock()
        prepared.arrival = self._arrivals
        if self.config.policy == "sessions":
            prepared.seniority = self._sessions.seniority(prepared.session, prepared.arrival, self.config.overtakes)
        self._arrivals += 1
        self._requests[prepared.request_id] = prepared
        self._meter.totals.requests += 1
        self._sessions.arrives(prepared.session)
        if not prepared.forked:
            self._scheduler.enqueue(prepared.sequences[0])
        elif prepared.held:
            self._scheduler.enqueue(prepared.held.pop(0))
        else:
            self._over.append(prepared)

    def abort(self, request_id: str) -> bool:
        """Drops a request at once and gives its blocks back. False when it is not known."""
        self._cancelling.dropped(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._drop(request)
        self._meter.totals.aborted += 1
        return True

    def cancel(self, request_id: str) -> None:
        """From any thread: an abort of this request is about to be asked for. A step that is for nobody else ends early."""
        self._cancelling.leaving(request_id)

    def has_work(self) -> bool:
        return self._has_runnable() or bool(self._over) or (self._prefetching is not None and self._prefetching.is_due())

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
        self._end_over(output)
        if self._prefetching is not None:
            self._prefetching.work()
        if not self._has_runnable():
            return output.chunks
        began = self._clock()
        plan = self._scheduler.schedule(began)
        totals = self._meter.totals
        totals.preemptions += plan.preempted
        for request in plan.started:
            totals.prompt_tokens += request.prompt_tokens
            totals.cached_tokens += request.cached_tokens
            self._sessions.began(request.session, request.sequences[0].digests, request.cached_tokens // self.config.block_size)
            output.started(request)
            for sequence, decision in request.ended:
                output.finished(request, sequence.index, decision)
        if not plan.scheduled:
            # Blocks are being loaded, and nobody can go on without them.
            time.sleep(_NOTHING_TO_DO)
            return output.chunks
        totals.steps += 1
        before = totals.generated_tokens
        try:
            logits = self._compute(plan)
            self._choose(plan, logits, output)
        except ForwardCancelledError:
            return output.chunks  # nothing of it counts, and whoever it was for is dropped before the next step
        except IntegrityError:
            raise  # the books are wrong: nothing that goes on from here can be trusted
        except Exception as error:
            logger.exception("a step failed; the %d sequences in it are dropped", len(plan.scheduled))
            message = f"The step that computed this request failed: {error or type(error).__name__}"
            for item in plan.scheduled:
                self._fail(item.sequence.request, "engine_error", message, output)
            return output.chunks
        prefilled = sum(item.count for item in plan.scheduled if item.is_prefill)
        decoded = sum(not item.is_prefill for item in plan.scheduled)
        totals.decode_passes += decoded
        if decoded:
            # Guesses that came true and forced tokens are tokens as well.
            first = sum(item.sequence.slots for item in plan.scheduled if item.is_prefill and item.samples)
            decoded = max(totals.generated_tokens - before - first, decoded)
        seconds = self._clock() - began
        self._meter.step(prefilled, decoded, seconds)
        if self._tiers is not None:
            self._tiers.store(self._cache.take_filled())
            if prefilled > _MOSTLY * decoded:
                self._tiers.prefill.took([(item.start, item.count) for item in plan.scheduled if item.is_prefill], seconds)
        return output.chunks

    def stats(self) -> WorkerStats:
        pool, totals = self._cache.pool, self._meter.totals
        return WorkerStats(
            instance=self._info.instance,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            waiting_prompt_tokens=self._scheduler.waiting_tokens,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            generated_tokens_total=totals.generated_tokens,
            preemptions_total=totals.preemptions,
            drafted_tokens_total=totals.drafted_tokens,
            accepted_tokens_total=totals.accepted_tokens,
            forced_tokens_total=totals.forced_tokens,
            decode_passes_total=totals.decode_passes,
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
            tiers=() if self._tiers is None else self._tiers.stats(),
        )

    def take_events(self) -> list[KVEvent]:
        events = self._cache.pool.take_events()
        return events if self._tiers is None else [*events, *self._tiers.take_events()]

    def snapshot(self) -> dict[str, bytes]:
        tiers = {} if self._tiers is None else self._tiers.snapshot()
        return {DEVICE: self._cache.pool.snapshot(), **tiers}

    def supersede(self, digests: Iterable[BlockHash]) -> int:
        digests = tuple(digests)
        if self._tiers is not None:
            self._tiers.mark(digests, SUPERSEDED)
        return self._cache.pool.supersede(digests)

    def retain(self, hints: Iterable[RetentionHint]) -> None:
        for hint in hints:
            self._sessions.told(hint)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the pool's references are exactly those of sequences that run or load and of fetches."""
        fetched = () if self._prefetching is None else self._prefetching.held
        self._cache.check_integrity((*self._scheduler.running, *self._scheduler.loading), fetched)

    def clear_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep what they have."""
        self._cache.pool.clear()

    def close(self) -> None:
        """Ends what the grammar compiler keeps running, and leaves the tiers. Idempotent."""
        if self._prefetching is not None:
            self._prefetching.close()
        if self._tiers is not None:
            self._tiers.close()
        if self._grammars is not None:
            self._grammars.close()

    def _has_runnable(self) -> bool:
        return self._scheduler.has_work() or (self._tiers is not None and self._tiers.has_arrived)

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
        self._cancelling.begin(item.sequence.request.request_id for item in plan.scheduled)
        try:
            logits = self._runner.run(batch, rows, copies)
        finally:
            self._cancelling.end()
        for item in plan.scheduled:
            self._cache.advance(item.sequence, item.known)
            request = item.sequence.request
            if request.held and item.sequence.computed >= request.prompt_tokens:
                for held in request.held:
                    self._scheduler.enqueue(held)
                request.held.clear()
        return logits

    def _choose(self, plan: StepPlan, logits: torch.Tensor, output: StepOutput) -> None:
        """Samples, and appends what was sampled. The first token of every choice comes from the prompt's last row."""
        wanted = rows_of(plan.scheduled)
        bitmask, wanted = self._bitmask(wanted, output)
        if not wanted:
            return
        rows = [row for one in wanted for row in one.rows]
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        sampled = iter(self._sampler.sample(logits, [state for one in wanted for state in one.states()], bitmask))
        for one in wanted:
            if one.sequence.status is Status.UNFORKED:
                self._fork(one.sequence)
        for one in wanted:
            tokens = [next(sampled) for _ in one.rows]
            if one.sequence.status is Status.RUNNING:  # a choice that failed has ended its siblings
                self._take(one, tokens, output)

    def _take(self, one: Choosing, tokens: list[SampledToken], output: StepOutput) -> None:
        """Appends what was sampled: the guesses that came true, and the first token that was not guessed."""
        sequence, drafted = one.sequence, one.drafted
        came_true = 0
        for guess, token in zip((*drafted, None), tokens, strict=True):
            true = guess is not None and token.error is None and token.token_id == guess
            came_true += true
            self._append(sequence, token, output, computed=true)
            if not true or sequence.status is not Status.RUNNING:
                break
        if drafted:
            self._meter.totals.drafted_tokens += len(drafted)
            self._meter.totals.accepted_tokens += came_true
            if sequence.draft_length is not None:
                sequence.draft_length.verified(len(drafted), came_true)
        if sequence.status is Status.RUNNING:
            self._force(sequence, output)

    def _force(self, sequence: Sequence, output: StepOutput) -> None:
        """Appends the tokens that the grammar leaves no choice about. Only logprobs need a pass for what is known anyhow."""
        if sequence.matcher is None or sequence.request.params.logprobs is not None:
            return
        for _ in range(MAX_FORCED):
            mask = allocate_bitmask(1, self._info.vocab_size)
            try:
                sequence.matcher.fill_bitmask(mask, 0)
            except Exception as error:  # noqa: BLE001 - fails this request alone, when its next token is chosen
                sequence.broken = error
                return
            token_id = only_token(mask[0])
            if token_id is None:
                sequence.next_mask = mask[0]
                return
            self._meter.totals.forced_tokens += 1
            self._append(sequence, SampledToken(token_id), output)
            if sequence.status is not Status.RUNNING:
                return

    def _bitmask(self, wanted: list[Choosing], output: StepOutput) -> tuple[torch.Tensor | None, list[Choosing]]:
        """What the grammars allow next, int32 [R, ceil(V / 32)], or None without any. A request whose grammar breaks fails and
        leaves the rows."""
        if all(one.sequence.matcher is None for one in wanted):
            return None, wanted
        bitmask = allocate_bitmask(sum(len(one.rows) for one in wanted), self._info.vocab_size)
        at = 0
        kept: list[int] = []
        for one in wanted:
            rows = range(at, at + len(one.rows))
            at = rows.stop
            if one.sequence.status is not Status.FINISHED and one.sequence.matcher is not None:
                self._fill(one, bitmask, rows, output)
            if one.sequence.status is not Status.FINISHED:
                kept.extend(rows)
        if len(kept) < at:
            bitmask = bitmask[kept]
        return bitmask, [one for one in wanted if one.sequence.status is not Status.FINISHED]

    def _fill(self, one: Choosing, bitmask: torch.Tensor, rows: range, output: StepOutput) -> None:
        sequence = one.sequence
        if sequence.broken is None and one.draft is not None and one.draft.masks is not None:
            bitmask[rows.start : rows.stop] = one.draft.masks
        elif sequence.next_mask is not None:
            bitmask[rows.start] = sequence.next_mask
        elif sequence.matcher is not None:
            try:
                if sequence.broken is not None:
                    raise sequence.broken
                sequence.matcher.fill_bitmask(bitmask, rows.start)
            except Exception as error:
                logger.exception("request %s: its grammar failed", sequence.request.request_id)
                message = f"The grammar failed: {error or type(error).__name__}"
                self._fail(sequence.request, "grammar_error", message, output)

    def _fork(self, sequence: Sequence) -> None:
        """Starts a choice from what choice 0 computed."""
        request = sequence.request
        request.forked = True
        self._cache.fork(request.sequences[0], sequence)
        self._scheduler.adopt(sequence)

    def _append(self, sequence: Sequence, sampled: SampledToken, output: StepOutput, *, computed: bool = False) -> None:
        """`computed`: it was guessed, and the step that has just run has computed it."""
        request = sequence.request
        if sampled.error is not None:
            self._fail(request, "sampling_error", sampled.error, output)
            return
        try:
            decision = sequence.append(sampled.token_id)
        except ForbiddenTokenError:
            message = f"The grammar does not allow token {sampled.token_id}, which was sampled; this is a bug."
            self._fail(request, "grammar_error", message, output)
            return
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self._fail(request, "engine_error", f"The request failed: {error or type(error).__name__}", output)
            return
        self._meter.totals.generated_tokens += 1
        if computed:
            self._cache.advance(sequence, 1)
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        output.token(request, sequence.index, sampled)
        if decision is None:
            return
        self._scheduler.finish(sequence)
        output.finished(request, sequence.index, decision)
        if request.finished:
            del self._requests[request.request_id]
            if self.config.prefix_caching:
                self._sessions.ended(request.session, request.root, request.sequences[0].digests)
            output.done(request, self._clock())

    def _end_over(self, output: StepOutput) -> None:
        """Ends requests that were resumed when all of their choices had come to an end."""
        over, self._over = self._over, []
        for request in over:
            if self._requests.get(request.request_id) is not request:
                continue  # aborted meanwhile
            del self._requests[request.request_id]
            now = request.started_at = self._clock()
            output.started(request)
            for sequence, decision in request.ended:
                output.finished(request, sequence.index, decision)
            output.done(request, now)

    def _fail(self, request: Request, code: str, message: str, output: StepOutput) -> None:
        if request.request_id in self._requests:
            self._drop(request)
            output.failed(request, code, message)

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            self._scheduler.finish(sequence)
