"""Hermes tool calls, as Nous Hermes, Qwen2.5 and Qwen3 write them:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.parser import StreamParser
from grammar.tools import ResponseFormat, Tool, ToolChoice


class HermesFormat:
    """See the module. `exempt_regions` keeps stop strings out of calls."""

    name = "hermes"
    exempt_regions = (("<tool_call>", "</tool_call>"),)

    def __init__(self, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits

    def system_prompt(self, tools: Sequence[Tool]) -> str:
        raise NotImplementedError

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        raise NotImplementedError

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        raise NotImplementedError

    def structural_tag(
        self, tools: Sequence[Tool], choice: ToolChoice = ToolChoice(), response_format: ResponseFormat = ResponseFormat()
    ) -> str | None:
        raise NotImplementedError

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, call_id: Callable[[], str]) -> StreamParser:
        raise NotImplementedError
