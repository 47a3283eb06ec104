"""Tools, tool choice and response format of an OpenAI body in the dialect-free form of `grammar.tools`."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.apis.openai.sampling import bad_field
from gateway.turn import TurnError
from grammar.tools import Tool, ToolChoice


def parse_tools(tools: list[Any] | None, warnings: list[str]) -> tuple[Tool, ...]:
    """In the order given. Kinds of tools that only a hosted service can run are skipped with a warning; a function that
    makes no sense is a TurnError 400 with a JSON pointer."""
    parsed: dict[str, Tool] = {}
    for position, tool in enumerate(tools or ()):
        pointer = f"/tools/{position}"
        if not isinstance(tool, dict):
            raise _bad_tool(pointer, "a tool must be an object")
        kind = tool.get("type", "function")
        if kind != "function":
            warnings.append(f"skipped {pointer}: unknown kind of tool {str(kind)[:40]!r}")
            continue
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _bad_tool(f"{pointer}/function", "an object with the function's name is expected")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _bad_tool(f"{pointer}/function/name", "a non-empty string is expected")
        if name in parsed:
            raise _bad_tool(f"{pointer}/function/name", f"there are two tools named {name[:64]!r}; rename one")
        description = function.get("description")
        if description is not None and not isinstance(description, str):
            raise _bad_tool(f"{pointer}/function/description", "a string is expected")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _bad_tool(f"{pointer}/function/parameters", "a JSON Schema object is expected")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise _bad_tool(f"{pointer}/function/strict", "a boolean is expected")
        parsed[name] = Tool(name=name, description=description, parameters=parameters, strict=bool(strict))
    return tuple(parsed.values())


def parse_tool_choice(choice: Any, parallel: bool | None, tools: tuple[Tool, ...], max_calls: int | None = None) -> ToolChoice:
    """none, auto, required, one named function, or allowed_tools; at most `max_calls` calls. Raises TurnError 400 for a choice
    these tools cannot meet."""
    chosen = _choice(choice, parallel, tools)
    return chosen if max_calls is None else msgspec.structs.replace(chosen, max_calls=max_calls)


def _choice(choice: Any, parallel: bool | None, tools: tuple[Tool, ...]) -> ToolChoice:
    in_parallel = parallel is not False
    if choice is None:
        return ToolChoice("auto", parallel=in_parallel)
    if isinstance(choice, str):
        if choice == "none":
            return ToolChoice("none", parallel=in_parallel)
        if choice == "auto":
            return ToolChoice("auto", parallel=in_parallel)
        if choice == "required":
            _need_tools(tools)
            return ToolChoice("required", parallel=in_parallel)
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else choice.get("name")
            return ToolChoice("named", name=_known(name, tools, "tool_choice.function.name"), parallel=in_parallel)
        if kind == "allowed_tools":
            return _allowed(choice, tools, in_parallel)
    raise bad_field(
        "tool_choice",
        'use "none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
    )


def _allowed(choice: dict[str, Any], tools: tuple[Tool, ...], parallel: bool) -> ToolChoice:
    inner = choice.get("allowed_tools", choice)
    if not isinstance(inner, dict):
        raise bad_field("tool_choice.allowed_tools", "an object with mode and tools is expected")
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise bad_field("tool_choice.allowed_tools.mode", 'use "auto" or "required"')
    listed = inner.get("tools")
    if not isinstance(listed, list) or not listed:
        raise bad_field("tool_choice.allowed_tools.tools", "a list of at least one tool is expected")
    names = []
    for position, entry in enumerate(listed):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        names.append(_known(name, tools, f"tool_choice.allowed_tools.tools[{position}]"))
    return ToolChoice(mode, allowed=tuple(dict.fromkeys(names)), parallel=parallel)


def _known(name: object, tools: tuple[Tool, ...], field: str) -> str:
    if not isinstance(name, str):
        raise bad_field(field, "the name of a tool is expected")
    _need_tools(tools)
    if all(tool.name != name for tool in tools):
        known = ", ".join(tool.name[:64] for tool in tools[:16])
        raise bad_field(field, f"there is no tool named {name[:64]!r}; tools are: {known}")
    return name


def _need_tools(tools: tuple[Tool, ...]) -> None:
    if not tools:
        raise bad_field("tool_choice", "it asks for a tool call, and there are no function tools in `tools`; add some")


def _bad_tool(pointer: str, problem: str) -> TurnError:
    return TurnError(400, "invalid_tool", f"{pointer}: {problem}.", param=pointer)
