"""Where the sessions of a set of trace files are, so that a replay reads each when its turn comes.

Scanning checks every line once and remembers byte offsets only: memory is 16 bytes a turn, plus the longest line.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traces.format import MAX_LINE_BYTES, TraceFormatError, decode_line, read_raw_lines
from traces.history import HistoryBuilder, RecordedTurn, check_follows

MAX_SESSIONS = 1_000_000


@dataclass(slots=True)
class SessionEntry:
    """One session of one file: the byte offset and the line number of each of its turns."""

    path: Path
    session: str
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lines: array[int] = field(default_factory=lambda: array("Q"))
    output_tokens: int = 0

    @property
    def turns(self) -> int:
        return len(self.offsets)

    def read(self) -> Iterator[RecordedTurn]:
        """The session's turns in order, one in memory at a time. Raises TraceFormatError."""
        builder = HistoryBuilder()
        name = str(self.path)
        try:
            with open(self.path, "rb") as handle:
                for offset, number in zip(self.offsets, self.lines, strict=True):
                    handle.seek(offset)
                    line = decode_line(handle.readline(MAX_LINE_BYTES + 1), path=name, number=number)
                    try:
                        yield builder.apply(line)
                    except TraceFormatError as error:
                        raise TraceFormatError(error.problem, path=name, line=number, field=error.field) from error
        except OSError as error:
            raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=name) from error


def expand_paths(paths: Iterable[str | Path]) -> list[Path]:
    """Files as given, and for a folder its *.jsonl files by name. Raises TraceFormatError for what is not there."""
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise TraceFormatError("the folder holds no .jsonl file", path=str(path))
            files.extend(found)
        elif path.exists():
            files.append(path)
        else:
            raise TraceFormatError("there is no such file", path=str(path))
    return files


def index_files(
    paths: Sequence[Path], *, max_line_bytes: int = MAX_LINE_BYTES, max_sessions: int = MAX_SESSIONS
) -> list[SessionEntry]:
    """Checks all files and finds their sessions, in order of first appearance.

    Raises TraceFormatError for the first line that is wrong, for a session spread over two files and for files without turns.
    """
    entries: dict[str, SessionEntry] = {}
    for path in paths:
        _index_file(path, entries, max_line_bytes, max_sessions)
    if not entries:
        raise TraceFormatError(f"no turns in {', '.join(str(path) for path in paths) or 'no files'}")
    return list(entries.values())


def _index_file(path: Path, entries: dict[str, SessionEntry], max_line_bytes: int, max_sessions: int) -> None:
    name = str(path)
    history: dict[str, int] = {}
    try:
        with open(path, "rb") as handle:
            for number, offset, data in read_raw_lines(handle, name, max_line_bytes=max_line_bytes):
                line = decode_line(data, path=name, number=number)
                try:
                    entry = _entry_of(line.session, path, entries, max_sessions)
                    keep = check_follows(line, entry.turns, history.get(line.session, 0))
                except TraceFormatError as error:
                    raise TraceFormatError(error.problem, path=name, line=number, field=error.field) from error
                history[line.session] = keep + len(line.messages) + 1
                entry.offsets.append(offset)
                entry.lines.append(number)
                entry.output_tokens += line.output_tokens
    except OSError as error:
        raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=name) from error


def _entry_of(session: str, path: Path, entries: dict[str, SessionEntry], max_sessions: int) -> SessionEntry:
    entry = entries.get(session)
    if entry is None:
        if len(entries) >= max_sessions:
            raise TraceFormatError(f"more than {max_sessions} sessions; split the trace", field="session")
        entry = entries[session] = SessionEntry(path, session)
    elif entry.path != path:
        raise TraceFormatError(f"session {session!r} is already in {entry.path}; a session lives in one file", field="session")
    return entry
