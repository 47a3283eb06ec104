"""Choices that are known only when a server starts, in the JSON Schema of its tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

MAX_CHOICES = 64


def offer_choices(function: Callable[..., Any], parameter: str, choices: Sequence[str], description: str) -> None:
    """Describes a string parameter, and lists its choices where there are at most MAX_CHOICES of them.

    Only the schema names the choices; the tool still checks what it gets. Call it before the function becomes a tool.
    """
    extra: dict[str, Any] = {"enum": list(choices)} if 0 < len(choices) <= MAX_CHOICES else {}
    function.__annotations__[parameter] = Annotated[str, Field(description=description, json_schema_extra=extra)]
