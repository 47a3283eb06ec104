"""Where a JSON text nests too deeply to be parsed: the place as a JSON pointer, and whose tool it is."""

from __future__ import annotations

import json
import re

from gateway.turn import TurnError

_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},:]', re.DOTALL)
_SHOWN = 8


def too_deep(text: str, end: int) -> TurnError:
    """The answer to a body that cannot be parsed because of what nests at character `end` of it."""
    path, tools = _path(text, end)
    pointer = "".join(f"/{part}" for part in path[:_SHOWN])
    if path[:1] == ["tools"] and len(path) > 2:
        name = tools.get(path[1])
        whose = f"of tool {name!r}" if name is not None else f"of tool {path[1]}"
        place = path.index("parameters") + 1 if "parameters" in path[:_SHOWN] else _SHOWN
        where = "".join(f"/{part}" for part in path[place:_SHOWN])
        return TurnError(
            400,
            "invalid_schema",
            f"The schema {whose} at '{where}' nests too deeply to be read. Flatten it.",
            param=pointer,
        )
    return TurnError(
        400,
        "malformed_body",
        f"The body is not valid JSON: depth limit exceeded at '{pointer}', where it nests too deeply. Flatten it.",
        param=pointer or None,
    )


def _path(text: str, end: int) -> tuple[list[str], dict[str, str]]:
    """Keys and positions down to the innermost value that is open at `end`, and the names of tools (by their position as a
    text) that were read on the way."""
    path: list[str] = []
    indices: list[int] = []  # in arrays; -1 for objects
    key, before, tools = "", "", {}
    for match in _TOKENS.finditer(text, 0, end):
        token = match[0]
        if token[0] == '"':
            if indices and indices[-1] < 0:
                if path and path[-1] == "name" and len(path) in (3, 4) and path[0] == "tools":
                    tools[path[1]] = _string(token)
                key = token
        elif token in "[{":
            indices.append(0 if token == "[" else -1)
            if token == "[":
                path.append("0")
        elif token == ":":
            path.append(_string(key).replace("~", "~0").replace("/", "~1"))
        elif indices:
            if path and (indices[-1] >= 0 or before != "{"):
                path.pop()  # a value ends
            if token != ",":
                indices.pop()
            elif indices[-1] >= 0:
                indices[-1] += 1
                path.append(str(indices[-1]))
        before = token
    return path, tools


def _string(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token[1:-1]
