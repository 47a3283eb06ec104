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
from typing import Any, NamedTuple

import msgspec
import orjson
import xxhash

from gateway.apis.body_pieces import BodyPieces

_MIN_BYTES = 8192
"""Shorter ones are parsed in less time than they are found."""
_FIRST_STEP = _MIN_BYTES // 2
_STEPS = 4
"""One is so many times the one before."""
_MESSAGE_BYTES = 600
"""Of a message's dicts, beside its text."""
_SPACES = rb"[ \t\r\n]*+"
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*"'
_PLAIN_HEAD = re.compile(
    # Before 3.11.5 re matches a possessive group that holds alternatives wrongly (CPython issues 100061 and 106052).
    _SPACES
    + rb"\{(?:"
    + _SPACES.join((b"", rb'"[^"\\]*+"', b":", rb"(?:" + _TEXT + rb"|[0-9.eE+-]++|true|false|null)", b",)*"))
    + _SPACES.join((b"", b'"messages"', b":", rb"\[")),
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
    where the bodies differ in nothing but messages. Before `BodyMemo.keep`, `frame` and `warnings` are set.

    `raw`: the body, where nothing of it was known; else `behind`: what came behind the known messages, and `end`: where the
    last message ends."""

    tenant: str
    raw: bytes = b""
    known: Known | None = None
    rest: list[Any] = field(default_factory=list)
    frame: Any = None
    warnings: tuple[str, ...] = ()
    behind: bytes = b""
    end: int = 0
    following: _Place | None = None


class _Place(NamedTuple):
    """Where a body parts from what is known. `hasher`: has taken all before `entry.end`; `steps`: digests of the body's first
    bytes, at each step."""

    entry: _Entry
    hasher: xxhash.xxh3_128
    steps: Mapping[int, bytes]


class Following:
    """A body on its way in, compared with what is known to begin like it. Its bytes are hashed as they come, once and while the
    caches hold them; the whole is never put together for that. `pieces`: what came.

    Entries are filed by the digest of as many of their first bytes as a step has (4096, four times as many, and so on): at
    every step the memory is asked who begins so, and where one of those ends, whether it is the one."""

    def __init__(self, memo: BodyMemo, tenant: str) -> None:
        self.tenant = tenant
        self.pieces = BodyPieces()
        self.place: _Place | None = None
        """Of the longest beginning that is known."""
        self._memo = memo
        self._hasher = xxhash.xxh3_128()
        self._steps: dict[int, bytes] = {}
        self._at = 0
        self._key: _Key = (tenant, 0, b"")
        self._step = self._next = _FIRST_STEP
        self._ends: list[int] = []  # of entries filed under _key, the next one last

    def feed(self, piece: bytes) -> None:
        """Takes what came."""
        self.pieces.add(piece)
        view, start = memoryview(piece), 0
        while len(view) - start >= self._next - self._at:
            end = start + self._next - self._at
            self._hasher.update(view[start:end])
            start, self._at = end, self._next
            self._look()
        if start < len(view):
            self._hasher.update(view[start:])
            self._at += len(view) - start

    def _look(self) -> None:
        """At a place where an entry may end, or where those that go on from here are found."""
        at, digest = self._at, self._hasher.digest()
        if at == self._step:
            self._key = self.tenant, at, digest
            self._steps[at] = digest
            self._step *= _STEPS
            self._ends = self._memo.ends(self._key)
        if self._ends and self._ends[-1] == at:
            self._ends.pop()
            entry = self._memo.entry(self._key, digest)
            if entry is not None:
                self.place = _Place(entry, self._hasher.copy(), self._steps)
        self._next = self._ends[-1] if self._ends else self._step


class BodyMemo:
    """Bodies of conversations, least recently used forgotten first, within `max_bytes` (estimated). Single-threaded."""

    def __init__(self, max_bytes: int) -> None:
        """0: nothing is remembered."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, dict[bytes, _Entry]] = OrderedDict()
        self.bytes = 0
        """Held, estimated."""

    def parse(self, seen: Following) -> tuple[dict[str, Any], Remembered] | None:
        """The object in a body, and what is known of it; None for one that must be parsed whole."""
        place, size = seen.place, seen.pieces.size
        if place is None or size < _MIN_BYTES:
            return None
        entry = place.entry
        behind = seen.pieces.part(entry.end, size)
        if behind.endswith(entry.tail):
            found = _between(entry, behind)
            if found is not None:
                more, end = found
                body = {**entry.known.body, "messages": entry.known.body["messages"] + more}
                known = entry.known
                return body, Remembered(
                    seen.tenant, known=known, rest=more, frame=known.frame, behind=behind, end=end, following=place
                )
        return _behind(seen, place, behind)

    def keep(self, seen: Remembered, body: dict[str, Any], messages: tuple[Mapping[str, Any], ...], digests: bytes) -> None:
        """Remembers a body whose messages are in order."""
        place = seen.following
        if not self._max_bytes:
            return
        if place is not None:
            old = place.entry
            head, end, before = old.head, seen.end, old.text_bytes
            step = _step(end)
            key = (seen.tenant, step, place.steps[step])
            length = end - old.end
            new, tail = seen.behind[:length], seen.behind[length:]
            hasher = place.hasher.copy()
            hasher.update(new)
            self._drop(old)
        else:
            raw = seen.raw
            if len(raw) < _MIN_BYTES:
                return
            found = _PLAIN_HEAD.match(raw, 0, _MAX_HEAD)
            if found is None:
                return
            head, before = found.end(), 0
            last = _array_end(raw, head)
            if last is None or last < _FIRST_STEP:
                return
            end = last
            view = memoryview(raw)  # a copy is not needed for a digest
            step = _step(end)
            hasher = xxhash.xxh3_128(view[:step])
            key = (seen.tenant, step, hasher.digest())
            hasher.update(view[step:end])
            new, tail = raw[:end], raw[end:]
        text_bytes = before + _held(new)
        nbytes = text_bytes + _MESSAGE_BYTES * len(messages) + _TAIL_FACTOR * _held(tail)
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

    def ends(self, key: _Key) -> list[int]:
        """Where the entries of a tenant end that begin with so many bytes of such a digest and reach to no further step, the
        nearest last."""
        filed = self._entries.get(key)
        return sorted({entry.end for entry in filed.values()}, reverse=True) if filed is not None else []

    def entry(self, key: _Key, digest: bytes) -> _Entry | None:
        """The one of those under `key` all of whose messages have this digest."""
        return self._entries.get(key, {}).get(digest)

    def _drop(self, entry: _Entry) -> None:
        bucket = self._entries.get(entry.key)
        if bucket is not None and bucket.get(entry.digest) is entry:
            del bucket[entry.digest]
            self.bytes -= entry.nbytes
            if not bucket:
                del self._entries[entry.key]


def _step(length: int) -> int:
    """The last step that a body of this length reaches; it reaches the first."""
    step = _FIRST_STEP
    while step * _STEPS <= length:
        step *= _STEPS
    return step


def _held(text: bytes) -> int:
    """Bytes that text takes as a Python string, at most."""
    return len(text) if text.isascii() else 4 * len(text)


def _between(entry: _Entry, behind: bytes) -> tuple[list[Any], int] | None:
    """The messages that a body has between what is known and the tail that it has had before, and where they end; None where
    that is no list of messages. `behind`: what it has behind what is known."""
    length = len(behind) - len(entry.tail)
    text = behind[:length].lstrip(_SPACE)
    if not text:
        return [], entry.end + length
    if text[:1] != b",":
        return None
    try:
        # Whatever would end the array early cannot be parsed between these brackets.
        more = orjson.loads(b"[" + text[1:] + b"]")
    except orjson.JSONDecodeError:
        return None
    return (more, entry.end + length) if more else None


def _behind(seen: Following, place: _Place, behind: bytes) -> tuple[dict[str, Any], Remembered] | None:
    """A body whose messages go on from what is known, and of which everything behind them may be new."""
    entry = place.entry
    head, rest = seen.pieces.part(0, entry.head), behind.lstrip(_SPACE)
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
    end = seen.pieces.size - len(short) + last
    if behind.find(b'"messages"', end - entry.end) >= 0:
        return None  # the name a second time, maybe: then the last counts
    more = body["messages"]
    if rest[:1] == b"," and not more:
        return None  # a comma with nothing behind it
    body["messages"] = entry.known.body["messages"] + more
    return body, Remembered(seen.tenant, known=entry.known, rest=more, behind=behind, end=end, following=place)


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
