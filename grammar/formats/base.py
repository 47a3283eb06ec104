"""What a tool-call text format is: a prompt, a grammar, a parser and a history renderer that agree with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grammar.formats.tags import Schemas
from grammar.parser import StreamParser
from grammar.thinking import Thinking
from grammar.tools import ResponseFormat, Tool, ToolChoice


class ToolFormat(Protocol):
    """One way of writing tool calls as text. Implementations are stateless and safe to share between threads."""

    @property
    def name(self) -> str:
        """A stable short name, such as "hermes"."""

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        """(begin text, end text) of the regions in which stop strings must not fire."""

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """Special tokens of the model that the parser has to see as text."""

    @property
    def owns_reasoning(self) -> bool:
        """Whether reasoning is a part of the format (channels) that its own grammar and parser know."""

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        """The text that tells a model of its tools, for chat templates that do not know tools ("" without tools).

        Goes into the system message (after the caller's own text and an empty line). The same tools in the same order
        give the same bytes, always.
        """

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as the model writes it under this format's grammar, without anything around it."""

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """An assistant message with (name, arguments) calls as one text, for templates that do not know tools."""

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        """One tool result as text. Results of parallel calls are joined with a newline into one user message."""

    def structural_tag(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = ToolChoice(),
        response_format: ResponseFormat = ResponseFormat(),
        *,
        thinking: Thinking | None = None,
        schemas: Schemas | None = None,
    ) -> str | None:
        """The grammar source (JSON text of an XGrammar structural tag), or None where any text is allowed. `thinking`: what may
        be reasoned before; the rest holds after it. `schemas`: notes what the grammar does not hold.

        Raises GrammarRefused for tools, a choice or a schema that cannot be turned into a grammar.
        """

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        """A fresh parser for one choice. `call_id` is called once for each call, when it starts."""

    def new_call_id(self) -> str:
        """An id for a call, unique among all there ever were, in the form the model's template takes."""

    def history_id(self, call_id: str) -> str:
        """The id of a past call in the form the model's template takes: the same for the same id, always."""
