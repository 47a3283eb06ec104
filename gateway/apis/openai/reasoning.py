"""What a body says of reasoning: how much effort, how many tokens, or none at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.apis.openai.sampling import INT32_MAX, bad_field

_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}
"""Tokens of reasoning for an effort, where the chat template does not take the effort itself."""


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """`effort`: OpenAI's word. `budget`: at most so many tokens of reasoning. `off`: no reasoning."""

    effort: str | None = None
    budget: int | None = None
    off: bool = False

    def budget_for(self, *, template_takes_effort: bool) -> int | None:
        """Tokens after which reasoning has to end; None: whenever it likes."""
        if self.off:
            return 0
        if self.budget is not None or template_takes_effort:
            return self.budget
        return _BUDGETS.get(self.effort or "")


def parse_reasoning(effort: str | None, thinking: Any, reasoning: Any, budgets: dict[str, int | None]) -> ReasoningWish:
    """reasoning_effort, Anthropic's `thinking`, `reasoning` of the Responses API and OpenRouter, and plain budgets by field.

    Raises TurnError 400 that names the field.
    """
    budget: int | None = None
    for name, value in budgets.items():
        if value is not None:
            budget = _tokens(value, name)
    off = effort == "none"
    if thinking is not None:
        if not isinstance(thinking, dict):
            raise bad_field("thinking", 'an object is expected, such as {"type": "enabled", "budget_tokens": 1024}')
        kind = thinking.get("type", "enabled")
        if kind not in ("enabled", "disabled", "adaptive", "auto"):
            raise bad_field("thinking.type", 'use "enabled", "adaptive" or "disabled"')
        off = off or kind == "disabled"
        for name in ("budget_tokens", "budget"):
            if thinking.get(name) is not None:
                budget = _tokens(thinking[name], f"thinking.{name}")
    if reasoning is not None:
        if not isinstance(reasoning, dict):
            raise bad_field("reasoning", 'an object is expected, such as {"effort": "low"}')
        given = reasoning.get("effort")
        if given is not None and not isinstance(given, str):
            raise bad_field("reasoning.effort", "a string is expected")
        effort = given if given is not None else effort
        off = off or effort == "none" or reasoning.get("enabled") is False
        if reasoning.get("max_tokens") is not None:
            budget = _tokens(reasoning["max_tokens"], "reasoning.max_tokens")
    return ReasoningWish(effort, budget, off)


def _tokens(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT32_MAX:
        raise bad_field(field, f"a number of tokens from 0 to {INT32_MAX} is expected")
    return value
