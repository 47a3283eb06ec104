"""Building blocks of structural tags (XGrammar 0.2.9), as plain JSON values: nothing here imports xgrammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grammar.limits import GrammarLimits
from grammar.pattern import PatternRefused, can_be_checked, examine_pattern
from grammar.schema import prepare_parameters, prepare_schema
from grammar.schemas.cost import estimated_milliseconds
from grammar.schemas.ladder import Relaxed
from grammar.thinking import Thinking
from grammar.tools import GrammarRefused, ResponseFormat, Tool, ToolChoice, Unenforced

Tag = dict[str, Any]

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


def structural_tag(content: Tag) -> str:
    """The JSON text that crosses the worker protocol. Equal contents give equal texts, which is what caches compare."""
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False, separators=(",", ":"))


def text(value: str) -> Tag:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Tag) -> Tag:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Tag]) -> Tag:
    """Any one of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags_between(elements: Sequence[Tag], *, separator: str, most: int | None) -> Tag:
    """One to `most` of these `tag`s (None: any number), with the separator between them and nothing else."""
    if most is not None and most > 1:
        further = {"type": "sequence", "elements": [text(separator), one_of(elements)]} if separator else one_of(elements)
        return sequence(one_of(elements), repeated(further, most - 1))
    return {
        "type": "tags_with_separator",
        "tags": list(elements),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": most == 1,
    }


def repeated(content: Tag, most: int | None) -> Tag:
    """Nothing, or up to `most` times (None: any number)."""
    return (
        {"type": "repeat", "min": 0, "max": most, "content": content}
        if most is not None
        else {"type": "star", "content": content}
    )


def optional(content: Tag) -> Tag:
    """It or nothing."""
    return {"type": "optional", "content": content}


def regex(pattern: str) -> Tag:
    """Text that the whole of a pattern matches, in XGrammar's syntax."""
    return {"type": "regex", "pattern": pattern}


def text_not_beginning(prefix: str) -> Tag:
    """Any text but one that begins with white space (or none) and then `prefix`.

    Written out character by character, because what comes after the first one that differs can then be any_text, whose masks
    cost XGrammar a thousandth of those of a pattern's `[\\s\\S]*`.
    """
    rest: Tag | None = None
    for position in range(len(prefix) - 1, -1, -1):
        char = prefix[position]
        space = "\\s" if position == 0 else ""
        ways = [sequence(regex(f"[^{_in_class(char)}{space}]"), text_without())]
        if rest is not None:
            ways.append(sequence(text(char), rest))
        rest = optional(one_of(ways))
    return sequence(regex("\\s*"), rest) if rest is not None else text_without()


def _in_class(char: str) -> str:
    return "\\" + char if char in "\\]^-[" else char


def text_without(*excluded: str) -> Tag:
    """Any text in which none of these occur."""
    return {"type": "any_text", "excludes": list(excluded)}


def text_until(trigger: str, then: Tag, *, excludes: Sequence[str] = ()) -> Tag:
    """Any text without `excludes`; once the trigger is written, `then` must follow and ends it."""
    return {"type": "dispatch", "rules": [[trigger, then]], "loop": False, "excludes": list(excludes)}


def after_thinking(thinking: Thinking | None, content: Tag) -> Tag:
    """What may be reasoned before, up to its budget, and then the content."""
    if thinking is None or thinking.tags is None:
        return content
    begin, end = thinking.tags.begin, thinking.tags.end
    inner = text_without(*thinking.words)
    if thinking.budget is not None:
        inner["max_tokens"] = thinking.budget
    after = [text(thinking.tags.after)] if thinking.tags.after else []
    if thinking.tags.special:
        region = [inner, {"type": "token", "token": end}, *after]
        opening: Tag = {"type": "token", "token": begin}
    else:
        region = [tag("", inner, end), *after]
        opening = text(begin)
    if thinking.state == "open":
        return sequence(*region, content)
    return sequence(optional(sequence(opening, *region)), content)


class Schemas:
    """Turns the schemas of one request into tags."""

    def __init__(self, limits: GrammarLimits, rung: int = 0, *, spared_milliseconds: float = 0.0) -> None:
        """`rung`: where on the ladder (grammar.schemas.ladder) to begin. `spared_milliseconds`: schemas estimated to compile
        faster begin at its top all the same."""
        self.limits = limits
        self._rung = rung
        self._spared = spared_milliseconds
        self._relaxed: dict[str | None, Relaxed] = {}

    def note(self, tool: str | None, *keywords: str) -> None:
        """The grammar does not hold these keywords of a tool's parameters (None: of the answer)."""
        for keyword in keywords:
            self._relaxed.setdefault(tool, {})[keyword, ""] = None

    def unenforced(self) -> tuple[Unenforced, ...]:
        """What was noted and what the ladder left out, tool by tool."""
        return tuple(
            Unenforced(tool, keyword, pointer) for tool, relaxed in self._relaxed.items() for keyword, pointer in relaxed
        )

    def parameters(self, tool: Tool) -> dict[str, Any]:
        """The prepared schema of a tool's arguments. Its title names the tool, for errors found while compiling."""
        relaxed: Relaxed = {}
        prepared = prepare_parameters(tool.name, tool.parameters, self.limits, relaxed=relaxed)
        if self._rung and estimated_milliseconds(prepared) >= self._spared:
            relaxed = {}
            prepared = prepare_parameters(tool.name, tool.parameters, self.limits, rung=self._rung, relaxed=relaxed)
        if relaxed:
            self._relaxed.setdefault(tool.name, {}).update(relaxed)
        return {"title": tool.name, **prepared}

    def arguments(self, tool: Tool) -> Tag:
        """A JSON object valid for a tool's parameters."""
        return {"type": "json_schema", "json_schema": self.parameters(tool)}

    def answer(self, response_format: ResponseFormat) -> Tag | None:
        """What an answer must be, or None for free text."""
        match response_format.kind:
            case "text":
                return None
            case "json_object":
                return {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": True}}
            case "choice":
                return one_of([text(choice) for choice in response_format.choices])
            case "regex":
                return regex(checked_regex(response_format.text or "", self.limits))
            case "grammar":
                return {"type": "grammar", "grammar": response_format.text}
        schema = response_format.schema
        if schema is None:
            raise GrammarRefused("A response format of kind json_schema needs a schema.", pointer="")
        relaxed: Relaxed = {}
        prepared = prepare_schema(schema, self.limits, relaxed=relaxed)
        if self._rung and estimated_milliseconds(prepared) >= self._spared:
            relaxed = {}
            prepared = prepare_schema(schema, self.limits, rung=self._rung, relaxed=relaxed)
        if relaxed:
            self._relaxed.setdefault(None, {}).update(relaxed)
        return {"type": "json_schema", "json_schema": prepared}


def checked_regex(pattern: str, limits: GrammarLimits) -> str:
    """A caller's pattern for a whole text. Raises GrammarRefused for one that is none, or would take too long."""
    if not can_be_checked(pattern):
        raise GrammarRefused(f"The regular expression {pattern[:80]!r} is not valid.")
    try:
        size = examine_pattern(pattern).size
    except PatternRefused:
        return pattern  # what JSON strings cannot hold, texts can; the worker tries it
    if size > limits.max_pattern_size:
        most = limits.max_pattern_size
        message = (
            f"The repetitions of the regular expression {pattern[:80]!r} come to {size} steps; at most {most} are allowed."
        )
        raise GrammarRefused(message)
    return pattern


def check_tools(tools: Sequence[Tool], limits: GrammarLimits) -> None:
    """Refuses too many tools, repeated names and names that are no identifiers."""
    if len(tools) > limits.max_tools:
        raise GrammarRefused(f"There are {len(tools)} tools; at most {limits.max_tools} are allowed.")
    seen: set[str] = set()
    for tool in tools:
        name = tool.name
        if not name:
            raise GrammarRefused("A tool has an empty name; give every tool a name of its own.", tool=name)
        if len(name) > limits.max_tool_name_length:
            most = limits.max_tool_name_length
            shown = name[:32] + "..."
            message = f"The name of tool {shown!r} has {len(name)} characters; at most {most} are allowed."
            raise GrammarRefused(message, tool=name)
        if not _NAME_CHARACTERS.issuperset(name):
            message = f"The name of tool {name!r} may only hold the letters a-z and A-Z, digits, and _ - . : /."
            raise GrammarRefused(message, tool=name)
        if name in seen:
            raise GrammarRefused(f"Two tools are named {name!r}; give every tool a name of its own.", tool=name)
        seen.add(name)


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools a choice lets the model call. Raises GrammarRefused for a choice that cannot be met."""
    if choice.mode == "none":
        return ()
    known = {tool.name for tool in tools}
    if choice.mode == "named":
        if choice.name not in known:
            raise GrammarRefused(f"The tool choice names {choice.name!r}, which is not among the tools.", tool=choice.name)
        return tuple(tool for tool in tools if tool.name == choice.name)
    if choice.allowed is not None:
        for name in choice.allowed:
            if name not in known:
                raise GrammarRefused(f"The tool choice allows {name!r}, which is not among the tools.", tool=name)
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if choice.mode == "required" and not tools:
        raise GrammarRefused("The tool choice requires a call, but there is no tool to call; send tools or choose 'auto'.")
    return tuple(tools)
