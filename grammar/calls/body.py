"""What reads one call, whatever it looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from grammar.deltas import Delta

SPACE = " \t\n\r"


class CallReader(Protocol):
    """Reads one call, from its first character on. The start is held until the name is known and the arguments have begun, so
    that everything that fails before can still become text."""

    @property
    def started(self) -> bool:
        """The call's ToolCallStart is out and cannot be taken back."""

    @property
    def done(self) -> bool:
        """The call is complete."""

    @property
    def failed(self) -> bool:
        """It is no call of a known tool, or broke off in what is none."""

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Consumes from `start` on and appends deltas; returns the index after the last consumed character. What cannot belong
        to the call is not consumed."""

    def cut(self, out: list[Delta]) -> bool:
        """The text ends inside the call. False when it had not come far enough to count as a call."""


MakeReader = Callable[[int], CallReader]
"""A fresh reader for the call of this index."""
