"""The seam between dialects and the rest: what an API's answer must be able to do. One implementation per endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.choices import TurnEvent
from gateway.running import RunningTurn
from gateway.telemetry.telemetry import Operation
from gateway.turn import TurnError


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """`envelope`: id, time and model. `prompt_ids`: of the prompts, where they were asked for; filled once they are known."""

    envelope: Mapping[str, Any]
    prompt_ids: list[Any]


class Answer(Protocol):
    """One turn's answer in one dialect: either whole (`body`) or as server-sent events (the other four, in this order).

    The bytes of events are complete SSE frames; b"" where there is nothing to say yet.
    """

    @property
    def dialect(self) -> str:
        """Name of the API for records: openai.chat, openai.completions."""

    @property
    def operation(self) -> Operation:
        """Name of the operation for telemetry."""

    @property
    def identity(self) -> AnswerIdentity:
        """What makes it this answer and no other of the same words."""

    def adopt(self, identity: AnswerIdentity) -> None:
        """This request is another try of one whose answer has this identity, in the same dialect: it gets the same. Called
        before anything else."""

    def body(self, running: RunningTurn) -> dict[str, Any]:
        """The whole answer of a turn that has ended, as JSON values."""

    def opening(self, running: RunningTurn) -> bytes:
        """What a stream begins with."""

    def event(self, event: TurnEvent) -> bytes:
        """What became certain."""

    def closing(self, running: RunningTurn) -> bytes:
        """What a complete stream ends with."""

    def failure(self, error: TurnError) -> bytes:
        """What a stream ends with that cannot go on."""
