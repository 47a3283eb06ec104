"""What formats share: how a choice, a response format and reasoning become a grammar around the calls of a format."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.calls.body import CallReader
from grammar.calls.sections import Section, SectionParser
from grammar.formats import tags
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.parser import StreamParser, TextParser
from grammar.thinking import Thinking
from grammar.tools import ResponseFormat, Tool, ToolChoice

Calls = Callable[[Sequence[Tool], int | None], tags.Tag]


class CallFormat(ABC):
    """The base of the formats; see `grammar.formats.base.ToolFormat` for the contract.

    `special_tokens`: the special tokens that the model's tokenizer has. Markers among them are tokens in the grammar, the
    others are text.
    """

    name: str
    markers: tuple[str, ...] = ()
    section: Section
    in_parallel = True
    """Whether the model may write several calls in one answer."""
    owns_reasoning = False
    lead = ""
    """What the template writes before the first call of an answer without text."""

    def __init__(self, limits: GrammarLimits = DEFAULT_LIMITS, special_tokens: frozenset[str] = frozenset()) -> None:
        self._limits = limits
        self._special_tokens = special_tokens

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        section = self.section
        return ((section.begin, section.closing or section.after_call),)

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        return tuple(marker for marker in self.markers if marker in self._special_tokens)

    def marker(self, text: str) -> tags.Tag:
        """A marker as this tokenizer knows it."""
        return {"type": "token", "token": text} if text in self._special_tokens else tags.text(text)

    @abstractmethod
    def system_prompt(self, tools: Sequence[Tool]) -> str: ...

    @abstractmethod
    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    @abstractmethod
    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str: ...

    @abstractmethod
    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str: ...

    def new_call_id(self) -> str:
        return "call_" + secrets.token_hex(12)

    def history_id(self, call_id: str) -> str:
        return call_id

    @abstractmethod
    def structural_tag(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = ToolChoice(),
        response_format: ResponseFormat = ResponseFormat(),
        *,
        thinking: Thinking | None = None,
        schemas: tags.Schemas | None = None,
    ) -> str | None: ...

    @abstractmethod
    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser: ...


class SectionFormat(CallFormat):
    """A format whose calls stand in one section at the end of an answer, of which a grammar and a parser follow."""

    @abstractmethod
    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        """One to `most` calls (None: any number), without the section's begin."""

    @abstractmethod
    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        """A reader for one call of these tools."""

    def not_a_call(self) -> tags.Tag:
        """Any text that does not begin like a call."""
        return tags.text_without(self.section.begin)

    def repeated(self, calls: Sequence[tags.Tag], most: int | None, *, between: str) -> tags.Tag:
        """One to `most` of these calls, each further one behind `between` and the section's begin."""
        begin = self.section.begin
        if begin not in self._special_tokens and all(call["type"] == "tag" for call in calls):
            return tags.tags_between(calls, separator=between + begin, most=most)
        one = tags.one_of(calls)
        if most == 1:
            return one
        before = [tags.text(between)] if between else []
        further = tags.sequence(*before, self.marker(begin), one)
        return tags.sequence(one, tags.repeated(further, None if most is None else most - 1))

    def structural_tag(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = ToolChoice(),
        response_format: ResponseFormat = ResponseFormat(),
        *,
        thinking: Thinking | None = None,
        schemas: tags.Schemas | None = None,
    ) -> str | None:
        """How the choices come out:

        - auto: any text, and once a call begins it can only end valid; after the first call only further calls may follow.
          With a response format: either calls and nothing else, or the answer in that format.
        - required, named: calls and nothing else (named: exactly one); a response format does not apply.
        - none: text in which no call can begin, or the answer in the response format.
        """
        schemas = schemas if schemas is not None else tags.Schemas(self._limits)
        tags.check_tools(tools, self._limits)
        callable_ = tags.callable_tools(tools, choice)
        answer = schemas.answer(response_format)
        reasons = thinking.words if thinking is not None else ()
        if not callable_:
            content = answer if answer is not None else self._free_text(bool(tools), reasons)
            if content is None and (thinking is None or thinking.budget is None):
                return None
            return tags.structural_tag(tags.after_thinking(thinking, content or tags.text_without(*reasons)))
        calls = self.calls(schemas, callable_, self._most(choice))
        begin = self.section.begin
        if choice.mode != "auto":
            content = self._only_calls(calls)
        elif answer is not None:
            content = tags.one_of([self._only_calls(calls), answer])
        elif not begin:
            content = tags.one_of([calls, self.not_a_call()])
        elif begin in self._special_tokens:
            called = tags.sequence(self.marker(begin), calls)
            content = tags.sequence(tags.text_without(*reasons), tags.optional(called))
        else:
            content = tags.text_until(begin, calls, excludes=reasons)
        return tags.structural_tag(tags.after_thinking(thinking, content))

    def _only_calls(self, calls: tags.Tag) -> tags.Tag:
        if not self.section.begin:
            return calls
        lead = [tags.text(self.lead)] if self.lead else []
        return tags.sequence(*lead, self.marker(self.section.begin), calls)

    def _free_text(self, has_tools: bool, reasons: tuple[str, ...]) -> tags.Tag | None:
        """Text in which no call begins; None where that says nothing."""
        begin = self.section.begin
        if not has_tools:
            return None
        if not begin:
            return self.not_a_call()
        excluded = reasons if begin in self._special_tokens else (begin, *reasons)
        return tags.text_without(*excluded)

    def _most(self, choice: ToolChoice) -> int | None:
        if choice.mode == "named" or not choice.parallel or not self.in_parallel:
            return 1
        return choice.max_calls

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        """Text is never read as a call under choice none, nor is the name of a tool the choice does not allow."""
        allowed = {tool.name: tool for tool in tags.callable_tools(tools, choice)}
        if not allowed:
            return TextParser()
        names = frozenset(allowed)
        return SectionParser(self.section, lambda index: self.reader(index, allowed, names, call_id), most=self._most(choice))


def signature(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API writes it, without what was not given."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def to_json(value: object) -> str:
    """The JSON of chat templates (`tojson` of transformers): keys as given, ", " and ": ", characters unescaped."""
    return json.dumps(value, ensure_ascii=False)
