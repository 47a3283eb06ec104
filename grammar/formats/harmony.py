"""gpt-oss's harmony: an answer is a series of messages on channels, behind a prompt that ends with `<|start|>assistant`.

    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json
    <|message|>{"city": "Paris"}<|call|>

(in one line). Reasoning is on the channel `analysis`, the answer on `final`; a call ends the answer. The model writes a call's
recipient before the channel, as the chat template does, or behind it; the grammar allows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.calls.channels import ChannelParser
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import CallFormat, to_json
from grammar.parser import StreamParser
from grammar.thinking import Thinking
from grammar.tools import ResponseFormat, Tool, ToolChoice

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"


class HarmonyFormat(CallFormat):
    """See the module, and `grammar.formats.base.ToolFormat` for the contract."""

    name = "harmony"
    markers = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
    section = Section(CHANNEL)
    in_parallel = False
    owns_reasoning = True

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        return ((f"{CHANNEL}analysis", END), (f"{CHANNEL}commentary", END))

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return ""
        shown = ""
        for tool in tools:
            described = " ".join((tool.description or tool.name).split())
            shown += f"// {described}\ntype {tool.name} = (_: {to_json(tool.parameters or {})}) => any;\n\n"
        return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{shown}}} // namespace functions"

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}{to_json(arguments)}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        rendered = [self.render_call(name, arguments) for name, arguments in calls]
        before = [f"{CHANNEL}analysis{MESSAGE}{content}"] if content else []
        return f"{END}{START}assistant".join([*before, *rendered])

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        return content

    def structural_tag(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = ToolChoice(),
        response_format: ResponseFormat = ResponseFormat(),
        *,
        thinking: Thinking | None = None,
        schemas: tags.Schemas | None = None,
    ) -> str | None:
        schemas = schemas if schemas is not None else tags.Schemas(self._limits)
        tags.check_tools(tools, self._limits)
        callable_ = tags.callable_tools(tools, choice)
        answer = schemas.answer(response_format)
        budget = thinking.budget if thinking is not None else None
        if not tools and answer is None and budget is None:
            return None
        reasoning = tags.text_without()
        if budget is not None:
            reasoning["max_tokens"] = budget
        endings = [self._call(schemas, tool, form) for tool in callable_ for form in (self._before, self._behind)]
        if not callable_ or choice.mode == "auto":
            endings.append(tags.sequence(*self._header("final"), answer if answer is not None else tags.text_without()))
        analysis = tags.sequence(*self._header("analysis"), reasoning, *self._next())
        if choice.mode == "auto" and callable_:
            preamble = tags.sequence(*self._header("commentary"), tags.text_without(), *self._next())
            first = tags.optional(analysis) if budget is not None else tags.repeated(analysis, None)
            before = tags.sequence(first, tags.optional(preamble))
        else:
            before = tags.optional(analysis) if budget is not None else tags.repeated(analysis, None)
        return tags.structural_tag(tags.sequence(before, tags.one_of(endings)))

    def _header(self, channel: str) -> list[tags.Tag]:
        return [self.marker(CHANNEL), tags.text(channel), self.marker(MESSAGE)]

    def _next(self) -> list[tags.Tag]:
        return [self.marker(END), self.marker(START), tags.text("assistant")]

    def _before(self, name: str) -> list[tags.Tag]:
        to = tags.text(f" to=functions.{name}")
        return [to, self.marker(CHANNEL), tags.text("commentary json"), self.marker(MESSAGE)]

    def _behind(self, name: str) -> list[tags.Tag]:
        to = tags.text(f"commentary to=functions.{name} ")
        return [self.marker(CHANNEL), to, self.marker(CONSTRAIN), tags.text("json"), self.marker(MESSAGE)]

    def _call(self, schemas: tags.Schemas, tool: Tool, form: Callable[[str], list[tags.Tag]]) -> tags.Tag:
        return tags.sequence(*form(tool.name), schemas.arguments(tool))

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        names = frozenset(tool.name for tool in tags.callable_tools(tools, choice))
        return ChannelParser(names, call_id, most=choice.max_calls if choice.parallel else 1)
