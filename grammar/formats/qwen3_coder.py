"""The XML of Qwen3-Coder and Qwen3.5:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Strings stand as they are, everything else is JSON, as these models' chat templates write it.
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
from grammar.tools import Tool

BEGIN = "<tool_call>"
END = "</tool_call>"
_SYNTAX = FieldSyntax("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>")
_TEXTS = FieldTexts("<parameter=", ">\n", "\n</parameter>", "\n")

_PROMPT = """\
# Tools

You have access to the following functions:

<tools>
{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>"""


class Qwen3CoderFormat(SectionFormat):
    """See the module, and `grammar.formats.base.ToolFormat` for the contract."""

    name = "qwen3_coder"
    markers = (BEGIN, END)
    section = Section(BEGIN, after_call=END)

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        return _PROMPT.format(tools="\n".join(to_json(signature(tool)) for tool in tools)) if tools else ""

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = [
            f"<parameter={key}>\n{value if isinstance(value, str) else to_json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        return f"{BEGIN}\n<function={name}>\n{''.join(written)}</function>\n{END}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = "\n".join(self.render_call(name, arguments) for name, arguments in calls)
        return "\n\n".join(part for part in (content, rendered) if part)

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = [
            tags.sequence(
                tags.text(f"\n<function={tool.name}>\n"),
                fields(schemas, tool, _TEXTS),
                tags.text("</function>\n"),
                self.marker(END),
            )
            for tool in tools
        ]
        return self.repeated(written, most, between="\n")

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return FieldsCall(index, _SYNTAX, {name: tool.parameters for name, tool in tools.items()}, call_id)
