"""Lists of tools from files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grammar.tools import Tool
from traces.record_samples import BUNDLED


class ToolsError(Exception):
    """A file has no tools. The message names it."""


def read_tools(paths: Sequence[Path]) -> list[Tool]:
    """The tools in these files and folders, each once, in order; by default the bundled sessions'. Raises ToolsError."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    found: dict[str, Tool] = {}
    if not paths:
        for session in sorted(BUNDLED.glob("*.jsonl")):
            for line in session.read_text().splitlines():
                for tool in _inside(json.loads(line)):
                    found.setdefault(json.dumps([tool.name, tool.parameters]), tool)
    for file in files:
        try:
            tools = list(_inside(json.loads(file.read_bytes())))
        except ValueError as error:
            raise ToolsError(f"{file} is not valid JSON: {error}.") from error
        for tool in tools:
            found.setdefault(json.dumps([tool.name, tool.parameters]), tool)
    if not found:
        raise ToolsError(f"There are no tools in {', '.join(map(str, paths)) or 'the bundled sessions'}.")
    return list(found.values())


def _inside(value: Any) -> Iterator[Tool]:
    """Tools as MCP (inputSchema) and OpenAI (function.parameters) write them, wherever they stand."""
    if isinstance(value, list):
        for child in value:
            yield from _inside(child)
    if not isinstance(value, dict):
        return
    name = value.get("name")
    if isinstance(name, str) and isinstance(value.get("inputSchema"), dict):
        yield Tool(name, value.get("description"), value["inputSchema"])
    elif value.get("type") == "function" and isinstance(value.get("function"), dict):
        function = value["function"]
        if isinstance(function.get("name"), str):
            yield Tool(function["name"], function.get("description"), function.get("parameters"))
    else:
        for child in value.values():
            yield from _inside(child)


def of_size(tools: Sequence[Tool], size: int) -> list[Tool]:
    """A list of so many tools with names of their own; where there are fewer, some stand in it again under other names."""
    listed: list[Tool] = []
    names: set[str] = set()
    for number in range(size):
        tool = tools[number % len(tools)]
        name = tool.name if tool.name not in names else f"{tool.name}_{number}"
        names.add(name)
        listed.append(Tool(name, tool.description, tool.parameters))
    return listed
