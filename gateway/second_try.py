"""An answer whose call violates its schema, generated once more without the part that does.

Only what the client has not seen can be replaced, so streamed answers keep their warning. The whole answer is generated again,
from the same prompt, by a grammar in which that part cannot be written; it replaces the first one only where it checks out.
Tokens of both are counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from gateway.after_check import AfterCheck, Found
from gateway.choices import ChoiceDecoder, ChoiceState
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Generation, Turn, TurnError
from gateway.workers.protocol import Done, Finished, Tokens
from grammar.schemas.excluding import without_part

StartAgain = Callable[[Turn, int, int], Awaitable[tuple[Generation, ChoiceDecoder]]]
"""(the turn as it is asked now, number of the prompt, index of the choice) -> a generation of one choice. Raises TurnError."""


@dataclass(frozen=True, slots=True)
class SecondTry:
    """Of one turn. `start` generates for a turn of one choice."""

    start: StartAgain
    turn: Turn
    check: AfterCheck
    telemetry: Telemetry

    async def of(self, prompt: int, state: ChoiceState, found: Found) -> tuple[ChoiceState | None, int]:
        """(what replaces it, None where nothing better came of it; how many tokens that took)."""
        changed = _without(self.turn, state, found)
        if changed is None:
            self.telemetry.generated_again("impossible")
            return None, 0
        try:
            again, tokens = await self._generate(changed, prompt, state.index)
        except TurnError:
            self.telemetry.generated_again("failed")
            return None, 0
        better = bool(again.calls) and again.finish_reason != "length" and not (await self.check.of(again)).sentences
        self.telemetry.generated_again("valid" if better else "invalid")
        if not better:
            return None, tokens
        again.violations.append(f"{found.sentences[0]}; it was generated once more, and is valid now")
        return again, tokens

    async def _generate(self, turn: Turn, prompt: int, index: int) -> tuple[ChoiceState, int]:
        generation, decoder = await self.start(turn, prompt, index)
        tokens = 0
        try:
            async for chunk in generation.chunks():
                match chunk:
                    case Tokens():
                        decoder.feed(chunk)
                    case Finished():
                        if chunk.finish_reason == "abort":
                            raise TurnError(503, "aborted", "The worker ended the generation before it was complete.")
                        decoder.finish(chunk)
                    case Done():
                        tokens = chunk.completion_tokens
        finally:
            await generation.aclose()
        if decoder.state.finish_reason is None:
            raise TurnError(502, "worker_error", "The worker's answer ended before the generation did.")
        return decoder.state, tokens


def _without(turn: Turn, state: ChoiceState, found: Found) -> Turn | None:
    """The turn with tools in which what was found cannot be written; None where that cannot be said."""
    tools = list(turn.tools)
    changed = False
    for call, pointer in found.places:
        name = state.calls[call].name
        position = next(i for i, tool in enumerate(tools) if tool.name == name)
        try:
            schema = without_part(tools[position].parameters, pointer, "".join(state.calls[call].arguments))
        except (ValueError, RecursionError):
            return None
        if schema is not None and json.dumps(schema) != json.dumps(tools[position].parameters):
            tools[position] = msgspec.structs.replace(tools[position], parameters=schema)
            changed = True
    if not changed:
        return None
    choice = turn.tool_choice
    if choice.mode == "auto" and not any(state.text):
        choice = msgspec.structs.replace(choice, mode="required", max_calls=len(state.calls))
    sampling = msgspec.structs.replace(turn.sampling, n=1)
    return dataclasses.replace(turn, tools=tuple(tools), tool_choice=choice, sampling=sampling)
