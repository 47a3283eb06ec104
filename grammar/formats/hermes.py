"""Hermes tool calls, as Nous Hermes, Qwen2.5 and Qwen3 write them:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The prompt text is the one these models were trained on (NousResearch/Hermes-Function-Calling, and the chat template of
Qwen2.5). What the grammar lets a model write and what `render_calls` writes from a history are the same bytes: one call a
tag, tags one line apart, nothing behind the last, and JSON spaced like `json.dumps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.call_body import CallBody
from grammar.calls.body import CallReader
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import SectionFormat, signature, to_json
from grammar.tools import Tool

BEGIN = "<tool_call>"
END = "</tool_call>"

_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class HermesFormat(SectionFormat):
    """See the module, and `grammar.formats.base.ToolFormat` for the contract."""

    name = "hermes"
    markers = (BEGIN, END)
    section = Section(BEGIN, after_call=END)

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return ""
        return _PROMPT.format(tools="\n".join(to_json(signature(tool)) for tool in tools))

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{BEGIN}\n{to_json({'name': name, 'arguments': arguments})}\n{END}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = [self.render_call(name, arguments) for name, arguments in calls]
        return "\n".join([content, *rendered] if content else rendered)

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        """The format has no place for a name or an id: results stand in the order of their calls."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = []
        for tool in tools:
            opening = f'\n{{"name": {to_json(tool.name)}, "arguments": '
            if END in self._special_tokens:
                call = tags.sequence(tags.text(opening), schemas.arguments(tool), tags.text("}\n"), self.marker(END))
            else:
                call = tags.tag(opening, schemas.arguments(tool), "}\n" + END)
            written.append(call)
        return self.repeated(written, most, between="\n")

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return CallBody(index, names, "arguments", call_id)
