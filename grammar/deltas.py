"""What a generation means, piece by piece: the output of the streaming parsers and the input of every API codec.

Call i ends before call i+1 starts; its id and name come once, in its `ToolCallStart`. However the token stream was cut,
the concatenated deltas are the same.
"""

from __future__ import annotations

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Text of a thinking region."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins. `index` counts calls of this choice from 0; `id` is unique."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """Call `index` is complete. `complete` is False when the generation was cut inside it."""

    index: int
    complete: bool = True


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
