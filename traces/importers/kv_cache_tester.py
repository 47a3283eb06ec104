"""Coding-agent sessions of callanjfox/kv-cache-tester: one JSON file a session, sub-agents nested where they were begun.

A request has `in` and `out` tokens, `hash_ids` of its full 64-token blocks, its time `t` and mostly `think_time`, the seconds
after the end of the one before. Ids mean the same block within one file only. A sub-agent becomes a session of its own that
begins at its `t`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traces.format import TraceFormatError
from traces.importers.blocks import BlockRequest, BlockSession, BlockTrace, digests_of


def read_kv_cache_tester(folder: Path, *, copies: int = 1) -> BlockTrace:
    """All traces of a folder. `copies`: of each, with contents of their own. Raises TraceFormatError."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise TraceFormatError("there is no .json file here", path=str(folder))
    sessions: list[BlockSession] = []
    sizes = set()
    for file in files:
        content = _load(file)
        sizes.add(content["block_size"])
        for copy in range(copies):
            sessions += _sessions(content, f"{content['id']}-{copy}", file)
    if len(sizes) != 1:
        raise TraceFormatError(f"one block size is expected in all files, not {sorted(sizes)}", path=str(folder))
    return BlockTrace("kv_cache_tester", sizes.pop(), tuple(sessions))


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"cannot be read: {error}", path=str(file)) from error
    if not isinstance(content, dict) or not {"id", "block_size", "requests"} <= content.keys():
        raise TraceFormatError("a session has `id`, `block_size` and `requests`", path=str(file))
    return content


def _sessions(content: dict[str, Any], name: str, file: Path) -> list[BlockSession]:
    size = content["block_size"]
    try:
        own = [request for request in content["requests"] if "hash_ids" in request]
        sessions = [BlockSession(name, own[0]["t"] if own else 0.0, _requests(own, name, size))]
        for request in content["requests"]:
            if "hash_ids" not in request:
                nested = request["requests"]
                key = f"{name}/{request['agent_id']}"
                sessions.append(BlockSession(key, float(request["t"]), _requests(nested, name, size), parent=name))
    except (KeyError, TypeError) as error:
        raise TraceFormatError(f"a request lacks {error}", path=str(file)) from error
    return [session for session in sessions if session.requests]


def _requests(given: Sequence[dict[str, Any]], scope: str, block_size: int) -> tuple[BlockRequest, ...]:
    requests = []
    before: dict[str, Any] | None = None
    for request in given:
        after = 0.0
        if before is not None:
            since = request["t"] - before["t"] - before.get("api_time", 0.0)
            after = max(0.0, request.get("think_time", since))
        full = request["hash_ids"][: request["in"] // block_size]
        requests.append(BlockRequest(after, request["in"], max(1, request["out"]), digests_of(scope, full)))
        before = request
    return tuple(requests)
