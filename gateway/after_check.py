"""What a grammar did not hold, checked in what was generated: said before in a warning, and afterwards how it came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.choices import ChoiceState
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Turn
from grammar.checking.checker import Checker
from grammar.tools import Unenforced

_SHOWN = 12


def unenforced_warnings(unenforced: Sequence[Unenforced]) -> list[str]:
    """A sentence for each tool: which keywords are checked afterwards instead of enforced, and where they stand."""
    by_tool: dict[str | None, list[str]] = {}
    for one in unenforced:
        place = f"{one.keyword} at {one.pointer}" if one.pointer else one.keyword
        by_tool.setdefault(one.tool, []).append(place)
    sentences = []
    for tool, places in list(by_tool.items())[:_SHOWN]:
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        whose = "the response format" if tool is None else f"tool {tool}"
        sentences.append(f"{whose}: checked afterwards instead of enforced: {', '.join(places[:_SHOWN])}{more}")
    if len(by_tool) > _SHOWN:
        sentences.append(f"the same of {len(by_tool) - _SHOWN} more tools")
    return sentences


@dataclass(frozen=True, slots=True)
class Found:
    """What one choice violates. `places`: (number of the call, JSON pointer into its arguments), of calls alone."""

    sentences: tuple[str, ...] = ()
    places: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AfterCheck:
    """Of one turn."""

    checker: Checker
    turn: Turn
    unenforced: tuple[Unenforced, ...]
    telemetry: Telemetry

    async def of(self, choice: ChoiceState) -> Found:
        """What the choice violates, a sentence each; none where all is well or nothing has to be checked."""
        tools = {one.tool for one in self.unenforced}
        sentences: list[str] = []
        places: list[tuple[int, str]] = []
        for position, call in enumerate(choice.calls):
            if call.name in tools and call.complete:
                schema = next((tool.parameters for tool in self.turn.tools if tool.name == call.name), None)
                found = await self._check(schema or {}, "".join(call.arguments), f"call {position} of {call.name}", sentences)
                places += [(position, one.partition(": ")[0]) for one in found]
        wanted = self.turn.response_format.schema
        if None in tools and wanted is not None and not choice.calls and choice.finish_reason != "length":
            await self._check(wanted, "".join(choice.text), "the answer", sentences)
        return Found(tuple(sentences), tuple(places))

    async def _check(self, schema: dict[str, object] | bool, text: str, what: str, sentences: list[str]) -> tuple[str, ...]:
        """What is wrong, each with its JSON pointer in front; said in a sentence, too."""
        result = await self.checker.check(schema, text)
        self.telemetry.arguments_checked(result.state)
        if result.state == "valid":
            return ()
        said = "; ".join(result.found)
        if result.state == "unknown":
            sentences.append(f"{what} could not be checked against its schema: {said}")
            return ()
        sentences.append(f"{what} violates its schema: {said}")
        return result.found
