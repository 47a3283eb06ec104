"""How urgent a turn is: what it asks for, within what its key may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gateway.access.entries import PRIORITY_CLASSES, PriorityClass
from gateway.auth import Caller
from gateway.turn import Turn, TurnError

PRIORITY = "X-Turnkeep-Priority"
_LEAST: Mapping[PriorityClass, int] = {"high": -(2**31), "normal": 0, "low": 1}
"""The smallest number of each class; smaller ones go first (`priority` in the body, as vLLM has it)."""
_USUAL: Mapping[PriorityClass, int] = {"high": -1, "normal": 0, "low": 1}


def ranked(turn: Turn, headers: Mapping[str, str], caller: Caller) -> tuple[Turn, PriorityClass]:
    """The turn with the priority that its worker gets, and its class. The header names a class; without it, the body's number
    does: below zero high, zero normal, above zero low. A key that may not ask for so much gets what it may, with a warning.
    Raises TurnError 400 for a header that names no class."""
    priority = turn.priority
    named = headers.get(PRIORITY, "")
    if not named and not priority and caller.priority != "low":
        # Nobody asks for anything, and every key but the lowest may have that.
        return turn, "normal"
    named = named.strip().lower()
    if named:
        if named not in PRIORITY_CLASSES:
            raise TurnError(
                400, "invalid_request", f"{PRIORITY}: one of {', '.join(PRIORITY_CLASSES)} is expected.", param=PRIORITY
            )
        asked: PriorityClass = named
        if _class_of(priority) != asked:
            priority = _USUAL[asked]
    else:
        asked = _class_of(priority)
    given = max(asked, caller.priority, key=PRIORITY_CLASSES.index)
    warnings = turn.warnings
    if given != asked:
        priority = max(priority, _LEAST[given])
        warnings = (*warnings, f"this key may not ask for priority {asked}; {given} was taken")
    if priority == turn.priority and warnings == turn.warnings:
        return turn, given
    return dataclasses.replace(turn, priority=priority, warnings=warnings), given


def _class_of(priority: int) -> PriorityClass:
    return "high" if priority < 0 else "normal" if priority == 0 else "low"
