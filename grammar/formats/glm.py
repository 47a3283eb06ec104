"""The XML of GLM:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

GLM-4.5 and 4.6 write a line for each; GLM-4.7 and GLM-5 write no line ends between the tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.calls.body import CallReader
from grammar.calls.fields import FieldsCall, FieldSyntax
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import SectionFormat, signature, to_json
from grammar.formats.field_tags import FieldTexts, fields
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.tools import Tool

BEGIN = "<tool_call>"
END = "</tool_call>"
_SYNTAX = FieldSyntax("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", END)

_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}{line}
<arg_key>{{arg-key-1}}</arg_key>{line}
<arg_value>{{arg-value-1}}</arg_value>{line}
...
</tool_call>"""


class GlmFormat(SectionFormat):
    """See the module, and `grammar.formats.base.ToolFormat` for the contract. `line`: what stands between the tags."""

    name = "glm"
    markers = (BEGIN, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    section = Section(BEGIN)
    lead: str

    def __init__(
        self,
        limits: GrammarLimits = DEFAULT_LIMITS,
        special_tokens: frozenset[str] = frozenset(),
        *,
        line: str = "\n",
    ) -> None:
        super().__init__(limits, special_tokens)
        self._line = self.lead = line
        self._texts = FieldTexts(
            "<arg_key>",
            f"</arg_key>{line}<arg_value>",
            "</arg_value>",
            line,
            special_tokens=special_tokens & set(self.markers),
        )

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        return ((BEGIN, END),)

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return ""
        return _PROMPT.format(tools="\n".join(to_json(signature(tool)) for tool in tools), line="")

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        line = self._line
        written = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value if isinstance(value, str) else to_json(value)}</arg_value>{line}"
            for key, value in arguments.items()
        ]
        return f"{BEGIN}{name}{line}{''.join(written)}{END}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = [self.render_call(name, arguments) for name, arguments in calls]
        return self._line.join([content, *rendered] if content else rendered)

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = [
            tags.sequence(tags.text(f"{tool.name}{self._line}"), fields(schemas, tool, self._texts), self.marker(END))
            for tool in tools
        ]
        return self.repeated(written, most, between=self._line)

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return FieldsCall(index, _SYNTAX, {name: tool.parameters for name, tool in tools.items()}, call_id)
