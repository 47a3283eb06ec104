"""DeepSeek's calls between markers of their own. V3.1 writes a name and JSON; V3 and R1 write a fenced block of JSON.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.calls.body import CallReader
from grammar.calls.named import NamedCall
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import SectionFormat, to_json
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.tools import Tool

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


class DeepSeekFormat(SectionFormat):
    """See the module, and `grammar.formats.base.ToolFormat` for the contract. `fenced`: as V3 and R1 write it."""

    name = "deepseek_v3"
    markers = (BEGIN, CALL, SEPARATOR, CALL_END, END)

    def __init__(
        self,
        limits: GrammarLimits = DEFAULT_LIMITS,
        special_tokens: frozenset[str] = frozenset(),
        *,
        fenced: bool = False,
    ) -> None:
        super().__init__(limits, special_tokens)
        self._fenced = fenced
        self._between = "\n" if fenced else ""
        after = f"```{CALL_END}" if fenced else CALL_END
        self.section = Section(BEGIN, after_call=after, separator="", again=CALL, closing=END)

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        """As the model card of V3.1 describes it."""
        if not tools:
            return ""
        shown = "\n\n".join(
            f"### {tool.name}\nDescription: {tool.description or ''}\n\nParameters: {to_json(tool.parameters or {})}"
            for tool in tools
        )
        call = self.render_call("tool_name", {}).replace("{}", "{json_arguments}")
        return (
            f"## Tools\nYou have access to the following tools:\n\n{shown}\n\n"
            f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{BEGIN}{call}{END}"
        )

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._fenced:
            return f"{CALL}function{SEPARATOR}{name}{_FENCE}{to_json(arguments)}{_FENCE_END}{CALL_END}"
        return f"{CALL}{name}{SEPARATOR}{to_json(arguments)}{CALL_END}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        if not calls:
            return content
        return f"{content}{BEGIN}{self._between.join(self.render_call(name, given) for name, given in calls)}{END}"

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        return f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = []
        for tool in tools:
            if self._fenced:
                name = [tags.text("function"), self.marker(SEPARATOR), tags.text(tool.name + _FENCE)]
            else:
                name = [tags.text(tool.name), self.marker(SEPARATOR)]
            end = [tags.text(_FENCE_END)] if self._fenced else []
            written.append(tags.sequence(self.marker(CALL), *name, schemas.arguments(tool), *end, self.marker(CALL_END)))
        one = tags.one_of(written)
        calls = [one]
        if most != 1:
            further = tags.sequence(tags.text(self._between), one) if self._between else one
            calls.append(tags.repeated(further, None if most is None else most - 1))
        return tags.sequence(*calls, self.marker(END))

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        if self._fenced:
            return NamedCall(index, names, call_id, separator="\n```json", prefix=f"{CALL}function{SEPARATOR}")
        return NamedCall(index, names, call_id, separator=SEPARATOR, prefix=CALL)
