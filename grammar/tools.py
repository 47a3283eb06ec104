"""The tools of a turn and what the caller allows the model to do with them, free of any API dialect."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """One function the model may call. `parameters` is its JSON Schema ({} and None: no parameters are described)."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """`auto`: text or calls. `required`: at least one call. `named`: exactly one call of `name`. `none`: text only.

    `allowed` restricts auto and required to these names (None: every tool). `max_calls`: at most so many (None: any number).
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    max_calls: int | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The shape of the text: free, any JSON object, JSON valid against `schema`, what a regular expression matches as a whole
    or an EBNF grammar (XGrammar's, from its rule `root`) derives (`text`), or one of `choices`. `field`: of the caller's."""

    kind: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"] = "text"
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    text: str | None = None
    choices: tuple[str, ...] = ()
    field: str | None = None


class Unenforced(msgspec.Struct, frozen=True):
    """A keyword that the grammar does not hold: it is checked in what was generated. `tool` None: of the response format.
    `pointer`: of the schema it stands in; "" where there are too many to say, or for the root."""

    tool: str | None
    keyword: str
    pointer: str = ""


class GrammarRefused(Exception):  # noqa: N818 - it is an answer to the caller
    """A tool list, schema or choice that cannot be turned into a grammar.

    `message` is a sentence; `tool` names the tool, `pointer` is a JSON pointer into its parameters (or into the response
    schema when `tool` is None). `costly`: nothing is wrong with it but what it would cost.
    """

    def __init__(self, message: str, *, tool: str | None = None, pointer: str | None = None, costly: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.tool = tool
        self.pointer = pointer
        self.costly = costly
