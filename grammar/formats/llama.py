"""The two ways of Llama 3 and its relatives: a JSON object, or a list of calls in Python.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    [get_weather(city="Paris"), now()]

Neither has a marker, so a call can only be the very beginning of an answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.call_body import CallBody
from grammar.calls.body import CallReader
from grammar.calls.python_call import PythonCall
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import SectionFormat, signature, to_json
from grammar.tools import GrammarRefused, Tool

_JSON_PROMPT = """\
You have access to the following functions. To call a function, please respond with JSON for a function call.
Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}.
Do not use variables.

{tools}"""

_PYTHON_PROMPT = """\
You have access to the following functions. If you decide to call functions, respond with nothing but a list of calls:
[func_name1(params_name1=params_value1, params_name2=params_value2), func_name2(params)]

{tools}"""


class _AtTheBeginning(SectionFormat):
    exempt_regions = ()

    @abstractmethod
    def not_a_call(self) -> tags.Tag:
        """Without a marker, calls are told from text by how an answer begins."""

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        return content

    def _prompt(self, form: str, tools: Sequence[Tool]) -> str:
        return form.format(tools="\n\n".join(to_json(signature(tool)) for tool in tools)) if tools else ""


class LlamaJsonFormat(_AtTheBeginning):
    """One call an answer: the models' own templates take no more."""

    name = "llama3_json"
    section = Section("")
    in_parallel = False

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        return self._prompt(_JSON_PROMPT, tools)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{{"name": {to_json(name)}, "parameters": {to_json(arguments)}}}'

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = "; ".join(self.render_call(name, arguments) for name, arguments in calls)
        return "\n".join(part for part in (content, rendered) if part)

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        return tags.one_of(
            [tags.tag(f'{{"name": {to_json(tool.name)}, "parameters": ', schemas.arguments(tool), "}") for tool in tools]
        )

    def not_a_call(self) -> tags.Tag:
        return tags.text_not_beginning('{"name": "')

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return CallBody(index, names, "parameters", call_id)


class PythonicFormat(_AtTheBeginning):
    """Arguments are keywords, so a tool's parameters must be described one by one, under names that Python allows."""

    name = "pythonic"
    section = Section("", opening="[", separator=",", closing="]")

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        return self._prompt(_PYTHON_PROMPT, tools)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={python_literal(value)}' for key, value in arguments.items())})"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = ", ".join(self.render_call(name, arguments) for name, arguments in calls)
        return "\n".join(part for part in (content, f"[{rendered}]" if calls else "") if part)

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = [tags.tag(tool.name, self._arguments(schemas, tool), "") for tool in tools]
        return tags.sequence(tags.text("["), tags.tags_between(written, separator=", ", most=most), tags.text("]"))

    def _arguments(self, schemas: tags.Schemas, tool: Tool) -> tags.Tag:
        schema = schemas.parameters(tool)
        names = schema.get("properties", {})
        if schema.get("type") != "object" or not all(name.isidentifier() for name in names):
            raise GrammarRefused(
                f"The parameters of tool {tool.name!r} cannot be written as keyword arguments; describe each under properties.",
                tool=tool.name,
                pointer="",
            )
        closed = {key: value for key, value in schema.items() if key not in ("patternProperties", "propertyNames")}
        return {
            "type": "json_schema",
            "json_schema": {**closed, "properties": names, "additionalProperties": False},
            "style": "python_call",
        }

    def not_a_call(self) -> tags.Tag:
        return tags.text_not_beginning("[")

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return PythonCall(index, names, call_id)


def python_literal(value: Any) -> str:
    """A JSON value in Python, its strings in double quotes."""
    match value:
        case True:
            return "True"
        case False:
            return "False"
        case None:
            return "None"
        case list():
            return f"[{', '.join(map(python_literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{to_json(key)}: {python_literal(inner)}' for key, inner in value.items())}}}"
    return to_json(value)
