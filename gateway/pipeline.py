"""The way of one turn: Turn and prompts to a dispatcher, and back as events. Knows no dialect and no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gateway.after_check import AfterCheck, unenforced_warnings
from gateway.choices import ChoiceDecoder
from gateway.config import GatewayConfig
from gateway.histories.keeper import Answered, HistoryKeeper, TurnHistory
from gateway.models import ModelRegistry, ServedModel
from gateway.prompts import PromptBuilder
from gateway.running import RunningTurn, Usage, close_all
from gateway.second_try import SecondTry
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Dispatcher, Generation, Prompt, Turn, TurnError, TurnObserver, TurnRecord
from gateway.watching.watch import TurnWatch, called_tools
from gateway.workers.protocol import RetentionHint, SamplingParams, WorkerInfo
from grammar.checking.checker import Checker
from grammar.detokenizer import Detokenizer
from grammar.parser import StreamParser, TextParser
from grammar.reasoning import ReasoningSplitter
from grammar.stop import TextStream
from grammar.tools import ToolChoice
from prefix_cache.hashing import BlockHash
from sessions.memory_store import MemoryLedgerStore
from sessions.store import LedgerStore

log = logging.getLogger(__name__)


class Pipeline:
    """What every API endpoint shares: models, prompts, the dispatcher, and who is told of turns."""

    def __init__(
        self,
        config: GatewayConfig,
        models: ModelRegistry,
        dispatcher: Dispatcher,
        telemetry: Telemetry,
        observers: Sequence[TurnObserver] = (),
        *,
        store: LedgerStore | None = None,
    ) -> None:
        """`store`: where sessions are kept; None: in this process."""
        self.models = models
        self.telemetry = telemetry
        self._dispatcher = dispatcher
        self._checker = Checker()
        self._second_tries = config.http.second_tries
        self._observers = tuple(observers)
        self._executor = ThreadPoolExecutor(config.http.threads, thread_name_prefix="prompt")
        self.keeper: HistoryKeeper | None = None
        if config.sessions.ledger:
            self.keeper = HistoryKeeper(
                store if store is not None else MemoryLedgerStore(config.sessions.max_bytes),
                models.all,
                config.sessions,
                self._executor,
                inline_characters=config.http.inline_characters,
                supersede=dispatcher.supersede,
                telemetry=telemetry,
            )
            self._executor.submit(self.keeper.warm_up)
        self.prompts = PromptBuilder(self._executor, inline_characters=config.http.inline_characters, keeper=self.keeper)
        self.watch = TurnWatch(config.misses, config.gaps, telemetry, dispatcher.retain, models)
        self._detokenizers = {model.name: Detokenizer(model.tokenizer.backend) for model in models.all}

    def close(self) -> None:
        """Frees the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._checker.close()

    def pool_info(self, model: ServedModel) -> WorkerInfo:
        """What the workers of a model have in common. Raises TurnError 503 while none is up."""
        return self._dispatcher.pool_info(model.name)

    async def run(
        self,
        model: ServedModel,
        turn: Turn,
        prompts: Sequence[Prompt],
        info: WorkerInfo,
        trace_headers: Mapping[str, str],
        *,
        history: TurnHistory | None = None,
        plain: bool = False,
        ended: Callable[[Usage], None] = lambda usage: None,
    ) -> RunningTurn:
        """Starts the turn's prompts on workers. `history`: its part in its session. `plain`: the text is never a tool call
        (completions). `ended` is told what was used when the RunningTurn is closed; not where this raises.

        Raises TurnError. Whoever gets the RunningTurn must close it.
        """
        session = turn.session if history is None else history.who
        generations: list[Generation] = []
        sent: list[Prompt] = []
        try:
            for position, prompt in enumerate(prompts):
                request_id = turn.request_id if len(prompts) == 1 else f"{turn.request_id}-{position}"
                generation, prompt = await self._dispatch(model, turn, session.key, prompt, info, request_id, trace_headers)
                generations.append(generation)
                sent.append(prompt)
        except BaseException:
            await asyncio.shield(close_all(generations))
            raise
        unenforced = tuple(dict.fromkeys(one for prompt in sent for one in prompt.unenforced))
        check = AfterCheck(self._checker, turn, unenforced, self.telemetry) if unenforced else None
        again: SecondTry | None = None
        if check is not None and self._second_tries and not turn.stream:

            async def start_again(changed: Turn, position: int, index: int) -> tuple[Generation, ChoiceDecoder]:
                plan = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self.prompts.grammars.of, model, changed
                )
                prompt = dataclasses.replace(sent[position], grammar=plan.source, unenforced=plan.unenforced)
                request_id = f"{turn.request_id}-again-{position}-{index}"
                generation, _ = await self._dispatch(model, changed, session.key, prompt, info, request_id, trace_headers)
                return generation, self._decoder(model, changed, index, plain=plain)

            again = SecondTry(start_again, turn, check, self.telemetry)
        for one in unenforced:
            self.telemetry.keyword_unenforced(one.keyword)
        decoders = [self._decoder(model, turn, index, plain=plain) for index in range(turn.sampling.n * len(prompts))]
        usage = Usage(prompt_tokens=sum(prompt.num_tokens for prompt in prompts))
        return RunningTurn(
            generations,
            decoders,
            usage,
            session,
            ended,
            warnings=unenforced_warnings(unenforced),
            after_check=check,
            second_try=again,
        )

    async def _dispatch(
        self,
        model: ServedModel,
        turn: Turn,
        known_as: str | None,
        prompt: Prompt,
        info: WorkerInfo,
        request_id: str,
        trace_headers: Mapping[str, str],
    ) -> tuple[Generation, Prompt]:
        """Starts a prompt. A grammar that its worker cannot compile is loosened, keyword by keyword, until it can."""
        rung: int | None = None
        refusals = 0
        while True:
            try:
                generation = await self._dispatcher.dispatch(
                    request_id=request_id,
                    model=model.name,
                    session=turn.session,
                    known_as=known_as,
                    prompt=prompt,
                    sampling=_within_context(turn.sampling, prompt, info),
                    priority=turn.priority,
                    trace_headers=trace_headers,
                    whole=not turn.stream,
                )
            except TurnError as error:
                if error.code != "invalid_grammar" or prompt.grammar is None:
                    raise
                if rung is None:
                    rung = self.prompts.grammars.of(model, turn).rung
                refusals += 1
                # Off the loop: preparing large schemas anew, some rungs of them, would hold up every stream.
                plan = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self.prompts.grammars.below, model, turn, prompt.grammar, rung, refusals
                )
                if plan is None:
                    if turn.response_format.field is not None:
                        error.param = turn.response_format.field
                    raise
                rung = plan.rung
                log.info("a worker refused a grammar, so less of it is enforced: %s", error.message)
                prompt = dataclasses.replace(prompt, grammar=plan.source, unenforced=plan.unenforced)
            else:
                return generation, prompt

    def retain(self, worker: str, hint: RetentionHint) -> None:
        """Passes a hint on to a worker, soon."""
        self._dispatcher.retain(worker, hint)

    def residency(self, digests: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many of a prompt's blocks, from the beginning, each worker holds."""
        return self._dispatcher.residency(digests)

    async def settle(
        self, history: TurnHistory | None, running: RunningTurn | None, *, final: bool = False, missed: bool = False
    ) -> None:
        """Writes a turn into its session: with its answer, or, where `running` is None, without one. `final`: with its answer
        the session is over. `missed`: it reused less than it could. A store that fails is no reason to fail the turn."""
        if self.keeper is None or history is None:
            return
        answered = Answered(missed=missed)
        if running is not None:
            usage = running.usage
            answered = Answered(
                choices=running.choices,
                worker=running.workers,
                instance=running.instances,
                missed=missed,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                seconds=running.worker_seconds,
                called=called_tools(running),
            )
        try:
            if not await self.keeper.close(history, answered):
                self.watch.closed(history.tenant, history.key)
            elif final and running is not None:
                await self.keeper.forget(history.tenant, history.key)
        except Exception:
            log.exception("the ledger of session %s could not be written", history.key)

    def _decoder(self, model: ServedModel, turn: Turn, index: int, *, plain: bool) -> ChoiceDecoder:
        sampling = turn.sampling
        parser: StreamParser = TextParser()
        if not plain and turn.tools and turn.tool_choice.mode != "none":
            parser = model.tool_format.parser(turn.tools, turn.tool_choice, model.tool_format.new_call_id)
        elif not plain and model.tool_format.owns_reasoning:
            parser = model.tool_format.parser((), ToolChoice("none"), model.tool_format.new_call_id)
        tags = turn.thinking.tags if turn.thinking is not None and not plain else None
        if turn.thinking is not None and tags is not None:
            parser = ReasoningSplitter(parser, begin=tags.begin, end=tags.end, inside=turn.thinking.state == "open")
        stream = TextStream(
            self._detokenizers[model.name].showing(sampling.visible_tokens),
            sampling.stop,
            sampling.stop_exempt,
            after=sampling.stop_after,
            min_tokens=sampling.min_tokens,
        )
        return ChoiceDecoder(
            index,
            stream,
            parser,
            withheld_ids=model.tokenizer.eos_token_ids.union(sampling.stop_token_ids),
            named_tool=turn.tool_choice.mode == "named",
        )

    @property
    def observed(self) -> bool:
        """Whether anybody wants the records of turns."""
        return bool(self._observers)

    def tell(self, record: TurnRecord) -> None:
        """A turn is over: observers hear of it. One that fails is logged; it is no reason to fail the turn."""
        for observer in self._observers:
            try:
                observer.turn_finished(record)
            except Exception:
                log.exception("an observer failed on turn %s", record.request_id)


def _within_context(sampling: SamplingParams, prompt: Prompt, info: WorkerInfo) -> SamplingParams:
    """max_tokens is an upper bound: where the context holds fewer, the answer ends there with `length`."""
    room = info.max_model_len - prompt.num_tokens
    if sampling.max_tokens is None or sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
