"""What a tool-call text format is: a prompt, a grammar, a parser and a history renderer that agree with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grammar.parser import StreamParser
from grammar.tools import ResponseFormat, Tool, ToolChoice


class ToolFormat(Protocol):
    """One way of writing tool calls as text. Implementations are stateless and safe to share between threads."""

    @property
    def name(self) -> str:
        """A stable short name, such as "hermes"."""

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        """(begin text, end text) of the regions in which stop strings must not fire."""

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
        self, tools: Sequence[Tool], choice: ToolChoice = ToolChoice(), response_format: ResponseFormat = ResponseFormat()
    ) -> str | None:
        """The grammar source (JSON text of an XGrammar structural tag), or None where any text is allowed.

        Raises GrammarRefused for tools, a choice or a schema that cannot be turned into a grammar.
        """

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        """A fresh parser for one choice. `call_id` is called once for each call, when it starts."""
