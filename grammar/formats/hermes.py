"""Hermes tool calls, as Nous Hermes, Qwen2.5 and Qwen3 write them:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The prompt text is the one these models were trained on (NousResearch/Hermes-Function-Calling, and the chat template of
Qwen2.5). What the grammar lets a model write and what `render_calls` writes from a history are the same bytes: one call a
tag, tags one line apart, nothing behind the last, and JSON spaced like `json.dumps`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.formats import tags
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.parser import StreamParser, TextParser
from grammar.tagged_calls import TaggedCallParser
from grammar.tools import ResponseFormat, Tool, ToolChoice

_BEGIN = "<tool_call>"
_END = "</tool_call>"

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


class HermesFormat:
    """See the module, and `grammar.formats.base.ToolFormat` for the contract."""

    name = "hermes"
    exempt_regions = ((_BEGIN, _END),)

    def __init__(self, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return ""
        return _PROMPT.format(tools="\n".join(_json(_signature(tool)) for tool in tools))

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{_BEGIN}\n{_json({'name': name, 'arguments': arguments})}\n{_END}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = [self.render_call(name, arguments) for name, arguments in calls]
        return "\n".join([content, *rendered] if content else rendered)

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        """The format has no place for a name or an id: results stand in the order of their calls."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def structural_tag(
        self, tools: Sequence[Tool], choice: ToolChoice = ToolChoice(), response_format: ResponseFormat = ResponseFormat()
    ) -> str | None:
        """How the choices come out:

        - auto: any text, and once a call begins it can only end valid; after the first call only further calls may follow.
          With a JSON response format: either calls and nothing else, or the JSON.
        - required, named: calls and nothing else (named: exactly one); a response format does not apply.
        - none: text in which no call can begin, or the JSON of the response format.
        """
        tags.check_tools(tools, self._limits)
        callable_ = tags.callable_tools(tools, choice)
        answer = tags.answer_in(response_format, self._limits)
        if not callable_:
            if answer is not None:
                return tags.structural_tag(answer)
            return tags.structural_tag(tags.text_without(_BEGIN)) if tools else None
        one = choice.mode == "named" or not choice.parallel
        calls = tags.tags_between([self._call(tool) for tool in callable_], separator="\n" + _BEGIN, only_one=one)
        if choice.mode != "auto":
            return tags.structural_tag(tags.sequence(tags.text(_BEGIN), calls))
        if answer is not None:
            return tags.structural_tag(tags.one_of([tags.sequence(tags.text(_BEGIN), calls), answer]))
        return tags.structural_tag(tags.text_until(_BEGIN, calls))

    def _call(self, tool: Tool) -> tags.Tag:
        """A call without its begin tag."""
        opening = f'\n{{"name": {_json(tool.name)}, "arguments": '
        return tags.tag(opening, tags.arguments_of(tool, self._limits), "}\n" + _END)

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        """Text is never read as a call under choice none, nor is the name of a tool the choice does not allow."""
        names = frozenset(tool.name for tool in tags.callable_tools(tools, choice))
        if not names:
            return TextParser()
        parallel = choice.parallel and choice.mode != "named"
        return TaggedCallParser(_BEGIN, _END, names, call_id, parallel=parallel)


def _signature(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API writes it, without what was not given."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _json(value: object) -> str:
    """The JSON of chat templates (`tojson` of transformers): keys as given, ", " and ": ", characters unescaped."""
    return json.dumps(value, ensure_ascii=False)
