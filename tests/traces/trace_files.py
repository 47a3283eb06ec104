"""Traces for tests."""

from __future__ import annotations

from traces.format import TurnLine, encode_line
from traces.index import index_files

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)


def write_trace(path, sessions=3, turns=4, *, gap=0.0, output_tokens=6, system="You look things up. " * 20, answer="recorded"):
    with open(path, "wb") as handle:
        for turn in range(turns):
            for session in range(sessions):
                new = ({"role": "system", "content": system}, {"role": "user", "content": f"session {session}"})
                if turn:
                    new = ({"role": "tool", "tool_call_id": "c", "content": f"result {turn} of {session} " * 5},)
                line = TurnLine(
                    v=1,
                    session=f"s{session}",
                    turn=turn,
                    gap_seconds=gap if turn else 0.0,
                    messages=new,
                    tools=TOOLS if turn == 0 else None,
                    model="recorded",
                    params={"temperature": 0.5, "tool_choice": "required", "stop": ["x"], "max_tokens": 99},
                    assistant={"role": "assistant", "content": answer if answer != "recorded" else f"recorded {turn}"},
                    output_tokens=output_tokens,
                )
                handle.write(encode_line(line))
    return index_files([path])
