"""What every step of preparing one schema needs: the limits, what was counted so far, and a way to refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from grammar.limits import GrammarLimits
from grammar.tools import GrammarRefused

Path = tuple[str | int, ...]

MAX_RELAXED_PLACES = 200


class Context:
    """The preparation of one schema. `tool` None: the schema of an answer. `dropped`: keywords to be left out wherever they
    stand. `relaxed`: where keywords stand whose meaning the result does not hold, in the order met."""

    def __init__(self, limits: GrammarLimits, tool: str | None, dropped: frozenset[str] = frozenset()) -> None:
        self.limits = limits
        self.tool = tool
        self.dropped = dropped
        self.relaxed: dict[tuple[str, str], None] = {}
        self._nodes = 0
        self._enum_values = 0

    def relax(self, keyword: str, path: Sequence[str | int]) -> None:
        """The keyword of the schema at this place will not be held. Past a bound only the keyword is remembered."""
        pointer = json_pointer(path) if len(self.relaxed) < MAX_RELAXED_PLACES else ""
        self.relaxed[keyword, pointer] = None

    def refuse(self, what: str, path: Sequence[str | int], *, costly: bool = False) -> NoReturn:
        """Raises GrammarRefused. `what` goes on after "The schema of ... at ...". `costly`: less of the schema would do."""
        pointer = json_pointer(path)
        whose = "the response format" if self.tool is None else f"tool {self.tool!r}"
        where = f" at {pointer!r}" if pointer else ""
        stop = "" if what.endswith("?") else "."
        raise GrammarRefused(f"The schema of {whose}{where} {what}{stop}", tool=self.tool, pointer=pointer, costly=costly)

    def count_node(self, path: Path) -> None:
        """One more schema in the result; merging can make it larger than what was sent."""
        self._nodes += 1
        if self._nodes > self.limits.max_schema_nodes:
            self.refuse(f"has more than {self.limits.max_schema_nodes} subschemas; send a simpler one", path)

    def count_enum(self, values: int, path: Path) -> None:
        self._enum_values += values
        if self._enum_values > self.limits.max_enum_values:
            most = self.limits.max_enum_values
            what = f"has more than {most} enum values in all; take a string with a description instead"
            self.refuse(what, path, costly=True)


def json_pointer(path: Sequence[str | int]) -> str:
    """RFC 6901."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def kind_of(value: object) -> str:
    """A JSON value's type, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else type(value).__name__
