"""The trajectory format: JSON Lines, one turn a line (docs/trajectory-format.md).

A line holds what its turn adds to the history before it: `messages` appended after the first `keep` messages of
(previous request + previous answer), and `tools` only where they differ from the previous turn's. So a file grows with
the text of a session and not with its square, two recordings diff line by line, and a reader needs one session's
history at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 * 1024 * 1024
"""The same bound as the gateway's default body limit: what it accepted can be written down."""

ScriptedPart = Literal["tool", "arguments", "text"]


class TraceFormatError(Exception):
    """A trace that cannot be read or written. The message names file, line and field, and what is wrong."""

    def __init__(self, problem: str, *, path: str | None = None, line: int | None = None, field: str | None = None) -> None:
        place = "".join((f"{path}" if path else "", f":{line}" if line is not None else ""))
        what = f"field `{field}`: " if field else ""
        super().__init__(f"{place}: {what}{problem}" if place else f"{what}{problem}")
        self.path = path
        self.line = line
        self.field = field
        self.problem = problem


class Usage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token counts the server reported. `cached_tokens` None: it did not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds as measured when recording. `started_at` is Unix time (None: left out, so that samples diff cleanly)."""

    duration: float
    time_to_first_token: float | None = None
    started_at: float | None = None


class TurnLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of one session: a line of a trace.

    `gap_seconds`: from the end of the session's previous turn to the start of this one (0 for the first).
    `keep`: how many messages of the history stay (None: all). `tools` None: as before; an empty list: none.
    `params`: the other fields of the request body (temperature, tool_choice, max_tokens ...).
    `assistant`: the message that entered the history; `output_tokens`: how many tokens the model generated for the turn.
    `scripted`: what a script and not the model chose; empty when the model chose everything.
    """

    v: int
    session: str
    turn: int
    gap_seconds: float = 0.0
    keep: int | None = None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    model: str | None = None
    params: dict[str, Any] = {}
    assistant: dict[str, Any]
    output_tokens: int
    finish_reason: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    scripted: tuple[ScriptedPart, ...] = ()


_DECODER = msgspec.json.Decoder(TurnLine)
_ENCODER = msgspec.json.Encoder()
_AT_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]+)`")


def encode_line(line: TurnLine, *, max_line_bytes: int = MAX_LINE_BYTES) -> bytes:
    """One line with its newline. Raises TraceFormatError for what no reader would take back."""
    check_values(line)
    try:
        encoded = _ENCODER.encode(line)
    except (TypeError, ValueError) as error:
        raise TraceFormatError(f"turn {line.turn} of session {line.session!r} is no JSON: {error}") from error
    if len(encoded) >= max_line_bytes:
        raise TraceFormatError(
            f"turn {line.turn} of session {line.session!r} takes {len(encoded)} bytes; a line holds less than {max_line_bytes}"
        )
    return encoded + b"\n"


def decode_line(data: bytes, *, path: str | None = None, number: int | None = None) -> TurnLine:
    """The inverse of `encode_line`. Raises TraceFormatError naming `path`, line `number` and the field."""
    try:
        line = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        field, problem = _explain(str(error))
        raise TraceFormatError(problem, path=path, line=number, field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(f"this is no JSON object of a turn: {error}", path=path, line=number) from error
    try:
        check_values(line)
    except TraceFormatError as error:
        raise TraceFormatError(error.problem, path=path, line=number, field=error.field) from error
    return line


def check_values(line: TurnLine) -> None:
    """What types cannot say. Raises TraceFormatError with the field."""
    if line.v != FORMAT_VERSION:
        raise TraceFormatError(f"version {line.v} is unknown; this program reads version {FORMAT_VERSION}", field="v")
    if not line.session:
        raise TraceFormatError("a session has a name of at least one character", field="session")
    for name, count in (("turn", line.turn), ("output_tokens", line.output_tokens), ("keep", line.keep or 0)):
        if count < 0:
            raise TraceFormatError(f"expected 0 or more, got {count}", field=name)
    _check_seconds("gap_seconds", line.gap_seconds)
    if line.timing is not None:
        _check_seconds("timing.duration", line.timing.duration)
        _check_seconds("timing.time_to_first_token", line.timing.time_to_first_token or 0.0)
    for index, message in enumerate(line.messages):
        if not isinstance(message.get("role"), str):
            raise TraceFormatError("a message has a `role`, a string", field=f"messages[{index}].role")
    if line.assistant.get("role") != "assistant":
        raise TraceFormatError("the answer's role is 'assistant'", field="assistant.role")


def _check_seconds(field: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise TraceFormatError(f"expected a finite number of seconds, 0 or more, got {value}", field=field)


def _explain(text: str) -> tuple[str | None, str]:
    """Splits msgspec's message into (field path, sentence)."""
    at = _AT_PATH.search(text)
    path = at["path"] if at else ""
    sentence = text[: at.start()] if at else text
    for pattern in (_MISSING, _UNKNOWN):
        if named := pattern.search(sentence):
            path = f"{path}.{named['name']}" if path else named["name"]
    return path or None, sentence[:1].lower() + sentence[1:]


def read_raw_lines(handle: BinaryIO, path: str, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, line) of each line, holding one line at a time. Raises TraceFormatError."""
    number = 0
    while True:
        offset = handle.tell()
        data = handle.readline(max_line_bytes + 1)
        if not data:
            return
        number += 1
        if len(data) > max_line_bytes:
            raise TraceFormatError(f"the line is longer than {max_line_bytes} bytes", path=path, line=number)
        if not data.strip():
            raise TraceFormatError("the line is empty; each line is one turn", path=path, line=number)
        yield number, offset, data


def read_lines(path: str | Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, TurnLine]]:
    """(line number, turn) of every line of a file, in order. Raises TraceFormatError, also for a file that cannot be read."""
    name = str(path)
    try:
        with open(path, "rb") as handle:
            for number, _offset, data in read_raw_lines(handle, name, max_line_bytes=max_line_bytes):
                yield number, decode_line(data, path=name, number=number)
    except OSError as error:
        raise TraceFormatError(f"cannot be read: {error.strerror or error}", path=name) from error


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """One text for equal JSON values: keys sorted. Raises TypeError or ValueError for what is no JSON."""
    return msgspec.json.encode(value, order="deterministic")
