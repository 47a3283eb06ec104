"""Which format a model writes: recognised by its chat template."""

from __future__ import annotations

from grammar.formats.base import ToolFormat
from grammar.formats.hermes import HermesFormat
from grammar.limits import DEFAULT_LIMITS, GrammarLimits


def format_for(chat_template: str | None, limits: GrammarLimits = DEFAULT_LIMITS) -> ToolFormat:
    """The format whose markers the template contains; Hermes for a template without any (and for none)."""
    return HermesFormat(limits)


def format_named(name: str, limits: GrammarLimits = DEFAULT_LIMITS) -> ToolFormat:
    """The format of this name. Raises KeyError with a sentence that lists the names there are."""
    if name != "hermes":
        raise KeyError(f"There is no tool-call format named {name!r}; known are: hermes.")
    return HermesFormat(limits)
