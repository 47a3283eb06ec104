"""What a conversation's body had in it last time, so that the next turn's is parsed from where it goes on.

An agent sends its whole history again with every turn. At 100,000 tokens that is half a megabyte, and parsing it, checking
its messages and naming each of them is most of what grows with a conversation. Where a body begins, byte for byte, with what
one of the same tenant began with that was parsed before, up to the end of a message, only the rest is parsed; the messages
before are the very objects of that time.

That the rest means the same by itself is checked, not assumed: the array that it was cut into must be the one that JSON's rules
take for `messages` (the last of that name), and before that name there must be nothing but plain fields. Anything odd is parsed
whole, and so are bodies with an error in them, so that it is described as it is.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
import xxhash

_MIN_BYTES = 8192
"""Shorter ones are parsed in less time than they are found."""
_MESSAGE_BYTES = 600
"""Of a message's dicts, beside its text."""
_PLAIN_HEAD = re.compile(
    rb'[ \t\r\n]*+\{(?:[ \t\r\n]*+"[^"\\]*+"[ \t\r\n]*+:[ \t\r\n]*+(?:"(?:[^"\\]|\\.)*+"|[0-9.eE+-]++|true|false|null)'
    rb'[ \t\r\n]*+,)*+[ \t\r\n]*+"messages"[ \t\r\n]*+:[ \t\r\n]*+\[',
    re.DOTALL,
)
_TAIL_FACTOR = 4
"""Tools are held as they came, as they were parsed, and as what the dialect made of them."""
_MAX_HEAD = 4096
_MAX_ALIKE = 32
"""Conversations that begin with the same bytes: each is compared."""
_SPACE = b" \t\r\n"

_Key = tuple[str, int, bytes]


class _Array(msgspec.Struct):
    messages: msgspec.Raw


_ARRAY = msgspec.json.Decoder(_Array)


@dataclass(frozen=True, slots=True)
class Known:
    """The beginning of a conversation. `body`: all that its last turn sent; `messages`: as a Turn carries them; `digests`:
    theirs, joined (sessions.digests); `warnings`: what was said about them; `frame`: what the dialect made of the rest."""

    body: dict[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    digests: bytes
    warnings: tuple[str, ...]
    frame: Any


@dataclass(frozen=True, slots=True)
class _Entry:
    """`end`: of the last message, in bytes of the body; `digest`: of all before it; `head`: where the array begins; `tail`:
    what came behind the last message."""

    key: _Key
    end: int
    digest: bytes
    head: int
    tail: bytes
    text_bytes: int
    nbytes: int
    known: Known


@dataclass(slots=True)
class Remembered:
    """How a body was parsed. `known`: None where all of it was parsed now; `rest`: its further messages. `frame` is only given
    where the bodies differ in nothing but messages. Before `BodyMemo.keep`, `frame` and `warnings` are set."""

    tenant: str
    raw: bytes
    known: Known | None = None
    rest: list[Any] = field(default_factory=list)
    frame: Any = None
    warnings: tuple[str, ...] = ()
    entry: _Entry | None = None
    end: int = 0


class BodyMemo:
    """Bodies of conversations, least recently used forgotten first, within `max_bytes` (estimated). Single-threaded."""

    def __init__(self, max_bytes: int) -> None:
        """0: nothing is remembered."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, dict[bytes, _Entry]] = OrderedDict()
        self.bytes = 0
        """Held, estimated."""

    def parse(self, tenant: str, raw: bytes) -> tuple[dict[str, Any], Remembered] | None:
        """The object in a body, and what is known of it; None for one that must be parsed whole."""
        if len(raw) < _MIN_BYTES or not self._entries:
            return None
        entry = self._find(tenant, raw)
        if entry is None:
            return None
        if raw.endswith(entry.tail) and len(raw) - len(entry.tail) >= entry.end:
            found = _between(entry, raw)
            if found is not None:
                more, end = found
                body = {**entry.known.body, "messages": entry.known.body["messages"] + more}
                return body, Remembered(tenant, raw, entry.known, more, entry.known.frame, entry=entry, end=end)
        return _behind(entry, tenant, raw)

    def keep(self, seen: Remembered, body: dict[str, Any], messages: tuple[Mapping[str, Any], ...], digests: bytes) -> None:
        """Remembers a body whose messages are in order."""
        raw, old = seen.raw, seen.entry
        if not self._max_bytes or len(raw) < _MIN_BYTES:
            return
        if old is not None:
            head, end = old.head, seen.end
        else:
            found = _PLAIN_HEAD.match(raw, 0, _MAX_HEAD)
            if found is None:
                return
            head = found.end()
            last = _array_end(raw, head)
            if last is None:
                return
            end = last
        view = memoryview(raw)  # a copy is not needed for a digest
        step = _step(end)
        hasher = xxhash.xxh3_128(view[:step])
        key = (seen.tenant, step, hasher.digest())
        hasher.update(view[step:end])
        start, before = (old.end, old.text_bytes) if old is not None else (0, 0)
        new, tail = raw[start:end], raw[end:]
        text_bytes = before + _held(new)
        nbytes = text_bytes + _MESSAGE_BYTES * len(messages) + _TAIL_FACTOR * _held(tail)
        if old is not None:
            self._drop(old)
        known = Known(body, messages, digests, seen.warnings, seen.frame)
        entry = _Entry(key, end, hasher.digest(), head, tail, text_bytes, nbytes, known)
        bucket = self._entries.setdefault(key, {})
        replaced = bucket.pop(entry.digest, None)
        if replaced is not None:
            self.bytes -= replaced.nbytes
        bucket[entry.digest] = entry
        self._entries.move_to_end(key)
        self.bytes += nbytes
        if len(bucket) > _MAX_ALIKE:
            self._drop(next(iter(bucket.values())))
        while self.bytes > self._max_bytes and self._entries:
            bucket = next(iter(self._entries.values()))
            self._drop(next(iter(bucket.values())))

    def _find(self, tenant: str, raw: bytes) -> _Entry | None:
        """The longest beginning of `raw` that is known. Entries are filed by the digest of their first 2**n bytes, n as large
        as they have, so a body is looked up with few digests, and is read about once."""
        view = memoryview(raw)
        step = _step(len(raw))
        while step >= _MIN_BYTES // 2:
            hasher = xxhash.xxh3_128(view[:step])
            bucket = self._entries.get((tenant, step, hasher.digest()))
            if bucket is not None:
                best = None
                at = step
                for entry in sorted(bucket.values(), key=_end) if len(bucket) > 1 else bucket.values():
                    if entry.end > len(raw):
                        break
                    hasher.update(view[at : entry.end])
                    at = entry.end
                    if hasher.digest() == entry.digest:
                        best = entry
                if best is not None:
                    return best
            step //= 2
        return None

    def _drop(self, entry: _Entry) -> None:
        bucket = self._entries.get(entry.key)
        if bucket is not None and bucket.get(entry.digest) is entry:
            del bucket[entry.digest]
            self.bytes -= entry.nbytes
            if not bucket:
                del self._entries[entry.key]


def _end(entry: _Entry) -> int:
    return entry.end


def _step(length: int) -> int:
    return 1 << (length.bit_length() - 1)


def _held(text: bytes) -> int:
    """Bytes that text takes as a Python string, at most."""
    return len(text) if text.isascii() else 4 * len(text)


def _between(entry: _Entry, raw: bytes) -> tuple[list[Any], int] | None:
    """The messages that a body has between what is known and the tail that it has had before, and where they end; None where
    that is no list of messages."""
    end = len(raw) - len(entry.tail)
    text = raw[entry.end : end].lstrip(_SPACE)
    if not text:
        return [], end
    if text[:1] != b",":
        return None
    try:
        # Whatever would end the array early cannot be parsed between these brackets.
        more = orjson.loads(b"[" + text[1:] + b"]")
    except orjson.JSONDecodeError:
        return None
    return (more, end) if more else None


def _behind(entry: _Entry, tenant: str, raw: bytes) -> tuple[dict[str, Any], Remembered] | None:
    """A body whose messages go on from what is known, and of which everything behind them may be new."""
    head, rest = raw[: entry.head], raw[entry.end :].lstrip(_SPACE)
    if rest[:1] == b",":
        short = head + rest[1:]
    elif rest[:1] == b"]":
        short = head + rest
    else:
        return None
    try:
        body = orjson.loads(short)
    except orjson.JSONDecodeError:
        return None
    last = _array_end(short, entry.head)
    if last is None:
        return None
    end = len(raw) - len(short) + last
    if raw.find(b'"messages"', end) >= 0:
        return None  # the name a second time, maybe: then the last counts
    more = body["messages"]
    if rest[:1] == b"," and not more:
        return None  # a comma with nothing behind it
    body["messages"] = entry.known.body["messages"] + more
    return body, Remembered(tenant, raw, entry.known, more, entry=entry, end=end)


def _array_end(raw: bytes, head: int) -> int | None:
    """The end of the last message of the array that begins right before `head`; None where that is not what JSON takes for the
    body's messages, or where the array is empty."""
    try:
        array = bytes(_ARRAY.decode(raw).messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # orjson reads deeper than msgspec
        return None
    end = head - 1 + len(array)
    if array[:1] != b"[" or raw[head - 1 : end] != array:
        return None
    inner = array[1:-1].rstrip(_SPACE)
    return head + len(inner)
