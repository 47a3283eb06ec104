"""From turns to lines and back: delta-encoding a session's history, and rebuilding it.

History after a turn is (messages of the request) + (the answer). `DeltaEncoder` keeps 16 bytes a message and never the
messages, so that a recorder can follow many sessions; `HistoryBuilder` keeps one session's messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from traces.format import TraceFormatError, TurnLine, canonical_json


def message_digest(message: Mapping[str, Any]) -> bytes:
    """Equal for messages equal as JSON values; 16 bytes. Raises TypeError or ValueError for what is no JSON."""
    return xxhash.xxh3_128_digest(canonical_json(message))


@dataclass(frozen=True, slots=True)
class Delta:
    """What a line says of its request: the fields `keep`, `messages` and `tools` of TurnLine."""

    keep: int | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None


class DeltaEncoder:
    """Delta-encodes the turns of one session. `forget` makes the next turn a full rewrite."""

    __slots__ = ("_history", "_rewrite", "_tools")

    def __init__(self) -> None:
        self._history: list[bytes] = []
        self._rewrite = False
        self._tools: bytes | None = None

    @property
    def digests(self) -> int:
        """Messages remembered, 16 bytes each."""
        return len(self._history)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]
    ) -> Delta:
        """The delta of a turn against the one before. Raises TypeError or ValueError, changing nothing, for what is no JSON."""
        digests = [message_digest(message) for message in messages]
        answer_digest = message_digest(answer)
        tools_digest = xxhash.xxh3_128_digest(b"\n".join(canonical_json(tool) for tool in tools))
        common = 0
        for known, sent in zip(self._history, digests, strict=False):
            if known != sent:
                break
            common += 1
        delta = Delta(
            keep=None if common == len(self._history) and not self._rewrite else common,
            messages=tuple(dict(message) for message in messages[common:]),
            tools=None if tools_digest == self._tools else tuple(dict(tool) for tool in tools),
        )
        self._history = [*digests, answer_digest]
        self._tools = tools_digest
        self._rewrite = False
        return delta

    def forget(self) -> None:
        """The next line repeats everything: the reader's history is not known, or not worth remembering."""
        self._history.clear()
        self._tools = None
        self._rewrite = True


def check_follows(line: TurnLine, next_turn: int, history: int) -> int:
    """How many of `history` messages stay when `line` comes as turn `next_turn` of its session.

    Raises TraceFormatError (without file and line) when it cannot.
    """
    if line.turn != next_turn:
        raise TraceFormatError(
            f"expected turn {next_turn} of session {line.session!r} here, got {line.turn}; turns are in order", field="turn"
        )
    keep = history if line.keep is None else line.keep
    if keep > history:
        raise TraceFormatError(
            f"cannot keep {keep} messages; the history of session {line.session!r} has {history}", field="keep"
        )
    if keep + len(line.messages) == 0:
        raise TraceFormatError("a request has at least one message", field="messages")
    return keep


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A line with its history put back: the request as it was sent. `messages` is this turn's own list."""

    line: TurnLine
    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...]


class HistoryBuilder:
    """Rebuilds the requests of one session from its lines, in order."""

    __slots__ = ("_history", "_next_turn", "_tools")

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] = []
        self._tools: tuple[dict[str, Any], ...] = ()
        self._next_turn = 0

    def apply(self, line: TurnLine) -> RecordedTurn:
        """The request of a line. Raises TraceFormatError (without file and line) for a line that does not follow the last."""
        keep = check_follows(line, self._next_turn, len(self._history))
        messages = [*self._history[:keep], *line.messages]
        if line.tools is not None:
            self._tools = line.tools
        self._history = [*messages, line.assistant]
        self._next_turn += 1
        return RecordedTurn(line=line, messages=messages, tools=self._tools)


def rebuild(lines: Iterable[TurnLine]) -> Iterator[RecordedTurn]:
    """The requests of one session's lines, in order. Raises TraceFormatError."""
    builder = HistoryBuilder()
    for line in lines:
        yield builder.apply(line)
