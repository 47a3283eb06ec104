"""A turn in flight: its generations on workers, merged and decoded into one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from gateway.after_check import AfterCheck
from gateway.choices import ChoiceDecoder, ChoiceState, TurnEvent
from gateway.second_try import SecondTry
from gateway.turn import Generation, Migration, Receipt, SessionRef, TurnError
from gateway.workers.protocol import Chunk, Done, Finished, Tokens

_AHEAD = 16


@dataclass(slots=True)
class Usage:
    """Tokens of a turn so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


async def close_all(generations: Sequence[Generation]) -> None:
    """Ends all of them, whatever becomes of one; then raises what went wrong first."""
    if len(generations) == 1:
        await generations[0].aclose()
        return
    results = await asyncio.gather(*(generation.aclose() for generation in generations), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class RunningTurn:
    """Generations of one turn (one for each prompt) and the decoders of their choices, numbered prompt by prompt."""

    def __init__(
        self,
        generations: Sequence[Generation],
        decoders: Sequence[ChoiceDecoder],
        usage: Usage,
        session: SessionRef,
        ended: Callable[[Usage], None] = lambda usage: None,
        *,
        warnings: Sequence[str] = (),
        after_check: AfterCheck | None = None,
        second_try: SecondTry | None = None,
    ) -> None:
        """`decoders`: as many for each generation, in order. `usage`: with the prompts already counted. `session`: whose turn
        it is; for one that named none, the session it was recognised as. `ended` is told what was used when nothing of it runs
        any more. `warnings`: what the caller has to know of the grammars; `after_check`: what is done because of them;
        `second_try`: and where that finds something wrong, for a turn whose answer nobody reads before it is whole."""
        self.session = session
        self.warnings = tuple(warnings)
        self._ended = ended
        self._after_check = after_check
        self._second_try = second_try
        self._generations = tuple(generations)
        self._decoders = tuple(decoders)
        self._choices = tuple([decoder.state for decoder in decoders])
        self._alone = len(generations) == 1
        self._per_generation = len(decoders) // len(generations)
        self._cached = [0] * len(generations)
        self._completion = [0] * len(generations)
        self._again = 0  # tokens of second tries
        self._prompt_tokens = usage.prompt_tokens
        self._seconds = [(0.0, 0.0)] * len(generations)
        self._cached_known = [True] * len(generations)
        self._closing: asyncio.Future[None] | None = None
        self._complete = False
        self._released: tuple[tuple[Receipt, ...], tuple[Migration, ...]] | None = None

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """Where the prompts went, in order."""
        if self._released is not None:
            return self._released[0]
        return tuple([generation.receipt for generation in self._generations])

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """How generations changed workers after they had started, prompt by prompt."""
        if self._released is not None:
            return self._released[1]
        return tuple(migration for generation in self._generations for migration in generation.migrations)

    @property
    def workers(self) -> str:
        """The workers' names, each once."""
        if self._alone and self._released is None:
            return self._generations[0].receipt.worker
        return ",".join(dict.fromkeys(receipt.worker for receipt in self.receipts))

    @property
    def instances(self) -> str:
        """The workers' instance ids, each once; "" where one is not known."""
        if self._alone and self._released is None:
            return self._generations[0].receipt.instance
        ids = dict.fromkeys(receipt.instance for receipt in self.receipts)
        return ",".join(ids) if all(ids) else ""

    @property
    def usage(self) -> Usage:
        """As known now; exact once `events` has ended."""
        if self._alone:
            return Usage(self._prompt_tokens, self._cached[0], self._completion[0] + self._again)
        return Usage(self._prompt_tokens, sum(self._cached), sum(self._completion) + self._again)

    @property
    def cached_known(self) -> bool:
        """Whether the workers have said how much was cached; until then `usage` has what was expected."""
        return all(self._cached_known)

    @property
    def worker_seconds(self) -> tuple[float, float]:
        """What workers spent on prefill and on decoding; known once `events` has ended."""
        if self._alone:
            return self._seconds[0]
        return sum(prefill for prefill, _ in self._seconds), sum(decode for _, decode in self._seconds)

    @property
    def choices(self) -> tuple[ChoiceState, ...]:
        """What the choices have said so far."""
        return self._choices

    @property
    def reasoning_tokens(self) -> int:
        """Of the generated tokens, those that were reasoning."""
        return sum([choice.reasoning_tokens for choice in self._choices])

    def release(self) -> None:
        """After the end: keeps what was said, where, and at what cost; prompts, connections and parsers go."""
        self._released = (self.receipts, self.migrations)
        self._generations, self._decoders = (), ()

    async def started(self) -> None:
        """Waits until every prompt has left its worker's queue; then `usage.cached_tokens` is known. Raises TurnError."""

        async def wait(position: int, generation: Generation) -> None:
            started = await generation.started()
            self._cached[position], self._cached_known[position] = started.cached_tokens, started.cached_known

        if len(self._generations) == 1:
            await wait(0, self._generations[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for position, generation in enumerate(self._generations):
                    group.create_task(wait(position, generation))
        except* TurnError as errors:
            raise errors.exceptions[0] from None

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Deltas and ends of the choices, as they come. Raises TurnError when a worker fails."""
        if self._alone:
            async for chunk in self._generations[0].chunks():
                if type(chunk) is Tokens:  # nearly all of them
                    self._completion[0] += len(chunk.token_ids)
                    yield self._decoder(0, chunk.index).feed(chunk)
                else:
                    for event in await self._last_words(0, chunk):
                        yield event
        else:
            async with aclosing(self._merged()) as merged:
                async for position, chunk in merged:
                    if type(chunk) is Tokens:
                        self._completion[position] += len(chunk.token_ids)
                        yield self._decoder(position, chunk.index).feed(chunk)
                    else:
                        for event in await self._last_words(position, chunk):
                            yield event
        if any(choice.finish_reason is None for choice in self._choices):
            raise TurnError(502, "worker_error", "The worker's answer ended before the generation did. Try again.")
        self._complete = True

    async def _last_words(self, position: int, chunk: Chunk) -> Sequence[TurnEvent]:
        """What the end of a choice, or of a generation, means."""
        match chunk:
            case Finished():
                if chunk.finish_reason == "abort":
                    raise TurnError(503, "aborted", "The worker ended the generation before it was complete. Try again.")
                decoder = self._decoder(position, chunk.index)
                delta, end = decoder.finish(chunk)
                if self._after_check is not None:
                    end = replace(end, violations=await self._checked(self._after_check, position, decoder.state))
                return delta, end
            case Done():
                self._cached[position], self._cached_known[position] = chunk.cached_tokens, chunk.cached_known
                self._completion[position] = chunk.completion_tokens
                self._seconds[position] = (chunk.prefill_seconds, chunk.decode_seconds)
        return ()

    async def _checked(self, check: AfterCheck, position: int, state: ChoiceState) -> tuple[str, ...]:
        """What a finished choice violates, or what it did that was replaced."""
        found = await check.of(state)
        if found.places and self._second_try is not None:
            better, tokens = await self._second_try.of(position, state, found)
            self._again += tokens
            if better is not None:
                self._choices = tuple([better if choice is state else choice for choice in self._choices])
                return tuple(better.violations)
        state.violations.extend(found.sentences)
        return found.sentences

    async def aclose(self) -> None:
        """Ends the generations that still run, at once; idempotent. It comes to its end also when it is cancelled."""
        if self._complete and self._closing is None:
            # Nothing is to be aborted, and whom it waits for is in the same process: no task of its own is needed.
            self._closing = asyncio.get_running_loop().create_future()
            self._closing.set_result(None)
            await self._close()
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await close_all(self._generations)
        finally:
            self._ended(self.usage)

    def _decoder(self, position: int, index: int) -> ChoiceDecoder:
        if not 0 <= index < self._per_generation:
            raise TurnError(502, "worker_error", f"The worker answered with choice {index}, which nobody asked for.")
        return self._decoders[position * self._per_generation + index]

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        if self._alone:
            async for chunk in self._generations[0].chunks():
                yield 0, chunk
            return
        # A bounded queue: a slow client slows its workers down instead of filling this process.
        queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(_AHEAD)

        async def pump(position: int, generation: Generation) -> None:
            try:
                async for chunk in generation.chunks():
                    await queue.put((position, chunk))
            except TurnError as error:
                await queue.put(error)
            else:
                await queue.put(None)

        pumps = [asyncio.create_task(pump(position, generation)) for position, generation in enumerate(self._generations)]
        try:
            left = len(pumps)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
