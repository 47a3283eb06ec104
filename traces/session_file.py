"""The file of one session, as the recorder appends to it: it always ends with a whole line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import xxhash

from traces.format import FORMAT_VERSION, MAX_LINE_BYTES, TraceFormatError, decode_line

READ_BACK_BYTES = 1 << 16
LINE_START = f'{{"v":{FORMAT_VERSION},'.encode()


def file_name(tenant: str, key: str) -> str:
    """A file name for a client-supplied session key: readable, bounded, unique, and free of path separators."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key).strip(".-")[:48] or "session"
    digest = xxhash.xxh3_64_hexdigest(f"{tenant}\x00{key}".encode("utf-8", "surrogatepass"))
    return f"{readable}-{digest}.jsonl"


@dataclass(slots=True)
class SessionFile:
    """`next_turn` is the index of the next line; `ended_at` when the last turn ended (Unix seconds)."""

    path: Path
    session: str
    next_turn: int = 0
    ended_at: float | None = None

    @classmethod
    def open(cls, path: Path, session: str) -> SessionFile:
        """Continues a file that is there: a line that was cut by a crash is cut off, the last whole one says where to go on.

        Raises OSError and TraceFormatError.
        """
        if not path.exists():
            return cls(path, session)
        last = _last_line(path)
        if last is None:
            return cls(path, session)
        line = decode_line(last, path=str(path))
        timing = line.timing
        ended_at = timing.started_at + timing.duration if timing is not None and timing.started_at is not None else None
        return cls(path, line.session, line.turn + 1, ended_at)

    def append(self, encoded: bytes, ended_at: float) -> int:
        """Writes one encoded line whole or not at all; returns its bytes. Raises OSError."""
        with open(self.path, "ab", buffering=0) as handle:
            before = handle.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(encoded):
                    written += handle.write(encoded[written:])
            except BaseException:
                handle.truncate(before)
                raise
        self.next_turn += 1
        self.ended_at = ended_at
        return len(encoded)


def _last_line(path: Path) -> bytes | None:
    """The last line that ends with a newline, after cutting off what follows it; None for an empty file.

    Raises TraceFormatError for a file that is no trace, and leaves it as it is.
    """
    with open(path, "r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        reach = min(READ_BACK_BYTES, size)
        while True:
            handle.seek(size - reach)
            tail = handle.read(reach)
            end = tail.rfind(b"\n") + 1
            begin = tail.rfind(b"\n", 0, end - 1) + 1 if end else 0
            whole_file = reach == size
            if begin or whole_file:
                break
            if reach > 2 * MAX_LINE_BYTES:
                raise TraceFormatError("the last line is too long for a trace", path=str(path))
            reach = min(reach * 4, size)
        if not end and size and not LINE_START.startswith(tail[: len(LINE_START)]):
            raise TraceFormatError("this is no trace; move it away", path=str(path))
        if end < len(tail):
            handle.truncate(size - len(tail) + end)
        return tail[begin:end] if end else None
