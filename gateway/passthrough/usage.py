"""Reads along with an answer that goes through: how many tokens it took, how many were cached, whether it went wrong."""

from __future__ import annotations

import msgspec

_MAX_LINE = 2**20
_MAX_BODY = 16 * 2**20


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """As OpenAI's API has it; None for what was not said."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None

    @property
    def cached_share(self) -> float | None:
        """Of the prompt, 0 to 1; None where the answer does not say."""
        cached = self.cached_tokens
        return None if cached is None or self.prompt_tokens <= 0 else min(max(cached / self.prompt_tokens, 0.0), 1.0)


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_ANSWERS = msgspec.json.Decoder(_Answer)


class AnswerReader:
    """Fed the bytes of an answer as they come; keeps one line of a stream, or one body, and both only up to a bound.

    `events`: of a stream, so far. `failed`: the answer is an error, whatever its status says.
    """

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._held = bytearray()
        self._skipping = False
        self.usage: Usage | None = None
        self.events = 0
        self.failed = False
        self._tail = b"\n\n"

    @property
    def at_event_end(self) -> bool:
        """Whether what came so far is whole events."""
        return self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    def feed(self, data: bytes) -> None:
        """More of the answer."""
        if not self._stream:
            if len(self._held) <= _MAX_BODY:
                self._held += data
            return
        self._tail = (self._tail + data[-4:])[-4:]
        *lines, rest = data.split(b"\n")
        for line in lines:
            if not self._skipping:
                self._line(bytes(self._held) + line if self._held else line)
            self._held.clear()
            self._skipping = False
        if len(self._held) + len(rest) > _MAX_LINE:
            self._held.clear()
            self._skipping = True
        elif not self._skipping:
            self._held += rest

    def end(self) -> None:
        """The answer is complete."""
        if not self._stream and 0 < len(self._held) <= _MAX_BODY:
            self._read(bytes(self._held))
        self._held.clear()

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        self.events += 1
        if b'"usage"' in line or b'"error"' in line:
            self._read(line[5:].strip())

    def _read(self, data: bytes) -> None:
        try:
            answer = _ANSWERS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if answer.usage is not None:
            self.usage = answer.usage
        if bytes(answer.error) != b"null":
            self.failed = True
