"""Sessions of public traces and of recordings as growing texts: what measures prompts needs no more of them.

Read are trajectory files (docs/trajectory-format.md), the results of sierra-research/tau-bench (a JSON list whose items have a
`traj` of OpenAI messages) and sessions of LMCache/lmcache-agent-trace (JSON Lines of timestamp, input, output, session_id).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from traces.format import TraceFormatError, canonical_json, read_lines
from traces.index import expand_paths


@dataclass(frozen=True, slots=True)
class TextSession:
    """`additions`: for each turn what its prompt has behind that of the turn before: the answer to that, and what is new."""

    name: str
    additions: tuple[str, ...]


def read_texts(paths: Iterable[Path]) -> list[TextSession]:
    """Sessions of two turns or more, those of each path in its order, the paths taking turns. Where a client has rewritten its
    history, the session goes on from what it was. Raises TraceFormatError."""
    sources = [[session for session in _of_path(path) if len(session.additions) > 1] for path in paths]
    return [session for row in zip_longest(*sources) for session in row if session is not None]


def _of_path(path: Path) -> Iterator[TextSession]:
    for file in [path] if path.suffix == ".json" else expand_paths([path]):
        if file.suffix == ".json":
            yield from _tau_bench(file)
        elif _is_lmcache(file):
            yield from _lmcache(file)
        else:
            yield from _trajectories(file)


def _trajectories(path: Path) -> Iterator[TextSession]:
    growing: dict[str, list[str]] = {}
    answers: dict[str, str] = {}
    for _, line in read_lines(path):
        additions = growing.setdefault(line.session, [])
        if line.keep is not None:
            continue
        texts = [canonical_json(part).decode() for part in (*(line.tools or ()), *line.messages)]
        additions.append("".join((answers.get(line.session, ""), *texts)))
        answers[line.session] = canonical_json(line.assistant).decode()
    for name, additions in growing.items():
        yield TextSession(name, tuple(additions))


def _tau_bench(path: Path) -> Iterator[TextSession]:
    try:
        results = json.loads(path.read_bytes())
        for number, result in enumerate(results):
            additions: list[str] = []
            new: list[str] = []
            for message in result["traj"]:
                if message["role"] == "assistant":
                    additions.append("".join(new))
                    new = []
                new.append(canonical_json(message).decode())
            yield TextSession(f"{path.stem}-{number}", tuple(additions))
    except OSError as error:
        raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceFormatError(f"a list of results with a traj of messages is expected: {error}", path=str(path)) from error


def _is_lmcache(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            row = json.loads(file.readline() or b"null")
    except OSError as error:
        raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() >= {"timestamp", "input", "output", "session_id"}


def _lmcache(path: Path) -> Iterator[TextSession]:
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                rows.append({"timestamp": int(row["timestamp"]), "input": str(row["input"]), "session": str(row["session_id"])})
            except (ValueError, KeyError, TypeError) as error:
                raise TraceFormatError(
                    f"a line has timestamp, input, output and session_id: {error}", path=str(path), line=number
                ) from error
    prompts: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        known = prompts.setdefault(row["session"], [])
        if not known or (row["input"].startswith(known[-1]) and row["input"] != known[-1]):
            known.append(row["input"])
    for name, known in prompts.items():
        starts = (0, *map(len, known))
        yield TextSession(name, tuple(prompt[start:] for prompt, start in zip(known, starts, strict=False)))
