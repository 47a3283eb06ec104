"""The conversation trace of kvcache-ai/Mooncake: JSON Lines of timestamp (ms), lengths and hash_ids of 512-token blocks.

It names no sessions. A request belongs to the session whose earlier prompt it continues: the owner of its deepest known
block, other than a first block, which is a system prompt that many share. The last block may be partial; it is left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from traces.format import TraceFormatError
from traces.importers.blocks import BlockRequest, BlockSession, BlockTrace, digests_of

BLOCK_SIZE = 512


def read_mooncake(file: Path) -> BlockTrace:
    """One file. `after` is the time since the session's previous request began: the trace does not say when that ended. Raises
    TraceFormatError."""
    owners: dict[int, int] = {}
    starts: list[float] = []
    last: list[float] = []
    sessions: list[list[BlockRequest]] = []
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                at, tokens, generated, ids = _fields(line, str(file), number)
                full = ids[: tokens // BLOCK_SIZE]
                session = next((owners[block] for block in reversed(full[1:]) if block in owners), None)
                if session is None:
                    session = len(sessions)
                    sessions.append([])
                    starts.append(at)
                    last.append(at)
                sessions[session].append(BlockRequest(at - last[session], tokens, max(1, generated), digests_of("", full)))
                last[session] = at
                for block in full[1:]:
                    owners.setdefault(block, session)
    except OSError as error:
        raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=str(file)) from error
    made = (BlockSession(f"conversation-{n}", starts[n], tuple(requests)) for n, requests in enumerate(sessions))
    return BlockTrace("mooncake", BLOCK_SIZE, tuple(made), open_loop=True)


def _fields(line: bytes, path: str, number: int) -> tuple[float, int, int, list[int]]:
    try:
        row = json.loads(line)
        return row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceFormatError(
            f"a line has timestamp, input_length, output_length and hash_ids: {error}", path=path, line=number
        ) from error
