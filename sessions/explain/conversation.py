"""What two turns are compared by, and how it is kept between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A turn as it was sent: normalised messages (gateway.turn.Turn), tools, and whatever else shapes its prompt, by the name
    of its field."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_size(self) -> int:
        """Characters of its contents."""
        return sum(len(content) for message in self.messages if isinstance(content := message.get("content"), str))


@dataclass(slots=True)
class RememberedText:
    """The last turn of a session, serialised: what the next one is compared with. `head`: tools and settings; `messages`: one
    JSON text each, changed by `go_on` alone. `nbytes`: about what it takes in memory."""

    head: bytes
    messages: list[bytes]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = len(self.head) + _size(self.messages) + 300

    def go_on(self, kept: int, messages: Sequence[bytes]) -> None:
        """Its first `kept` messages, and `messages` behind them. Costs what changes."""
        self.nbytes += _size(messages) - _size(self.messages[kept:])
        self.messages[kept:] = messages

    def conversation(self) -> Conversation:
        """As it was."""
        load = msgspec.json.decode  # unlike orjson it keeps integers of any size
        head = load(self.head)
        return Conversation([load(message) for message in self.messages], head[0], head[1])


def _size(messages: Sequence[bytes]) -> int:
    return sum(map(len, messages)) + 60 * len(messages)


def dump(value: Any) -> bytes:
    """JSON text of a value: of integers beyond 64 bits and half surrogate pairs too, of what is too deep an empty one."""
    try:
        # Not orjson, whose texts take four kilobytes each however short they are, which is no matter unless they are kept.
        return _ENCODER.encode(value)
    except (OverflowError, UnicodeError, TypeError, RecursionError):
        try:
            return json.dumps(value, default=str).encode()
        except (RecursionError, ValueError, TypeError):
            return b"{}"


def dump_head(conversation: Conversation) -> bytes:
    """JSON text of tools and settings."""
    return dump([list(conversation.tools), dict(conversation.settings)])
