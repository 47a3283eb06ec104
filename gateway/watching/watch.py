"""Both watches over one turn, as the pipeline tells of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.choices import ChoiceState
from gateway.histories.keeper import TurnHistory
from gateway.models import ModelRegistry
from gateway.running import RunningTurn
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Turn
from gateway.watching.config import MissesConfig
from gateway.watching.gaps import GapWatch, Retain
from gateway.watching.misses import MissExplainer, WatchedMiss
from grammar.arguments import arguments_object
from sessions.explain.misses import Miss, Place
from sessions.gaps.model import GapConfig

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WatchedTurn:
    """A turn between its prompt and its end."""

    turn: Turn
    key: str
    missed: WatchedMiss

    @property
    def miss(self) -> Miss | None:
        """As far as it is known."""
        return self.missed.miss


class TurnWatch:
    """Tells of no failure: whatever goes wrong here is logged, and no reason to fail a turn. Use on one event loop."""

    def __init__(
        self, misses: MissesConfig, gaps: GapConfig, telemetry: Telemetry, retain: Retain, models: ModelRegistry
    ) -> None:
        self.gaps = GapWatch(gaps, retain)
        self.misses = MissExplainer(misses, telemetry.missed, lambda name, ids: models.find(name).tokenizer.decode(ids))

    def began(self, turn: Turn, history: TurnHistory | None) -> WatchedTurn | None:
        """A turn's prompt is made; None for one that is no part of a session."""
        if history is None:
            return None
        try:
            self.gaps.began(history.tenant, history.key, history.record)
            return WatchedTurn(turn, history.key, self.misses.began(turn, history))
        except Exception:
            log.exception("turn %s could not be watched", turn.request_id)
            return None

    def started(self, watched: WatchedTurn | None, running: RunningTurn) -> Miss | None:
        """The prompt has left its queue: what was cached is known. The turn's miss, if it is one."""
        if watched is None:
            return None
        try:
            return self.misses.started(watched.missed, running.usage.cached_tokens, Place(running.workers, running.instances))
        except Exception:
            log.exception("the miss of turn %s could not be explained", watched.turn.request_id)
            return None

    def ended(self, watched: WatchedTurn | None, running: RunningTurn | None) -> None:
        """The turn is over; `running` None: without a complete answer."""
        if watched is None or running is None:
            return
        try:
            usage, place = running.usage, Place(running.workers, running.instances)
            self.misses.started(watched.missed, usage.cached_tokens, place)
            prefill, _ = running.worker_seconds
            self.misses.answered(watched.missed, _message(running.choices[0]), usage, prefill, place)
            self.gaps.ended(watched.turn, watched.key, place.worker, called_tools(running))
            if watched.turn.session.final:
                self.closed(watched.turn.session.tenant, watched.key)
        except Exception:
            log.exception("the end of turn %s could not be watched", watched.turn.request_id)

    def closed(self, tenant: str, key: str) -> None:
        """The session is over: nothing is remembered of it, and its next turn is not waited for."""
        self.misses.log.forget(tenant, key)
        self.gaps.closed(tenant, key)


def called_tools(running: RunningTurn) -> tuple[str, ...]:
    """What an answer calls, in order, each name once."""
    return tuple(dict.fromkeys(call.name for choice in running.choices for call in choice.calls))


def _message(choice: ChoiceState) -> Mapping[str, Any]:
    """The answer as a normalised message, as its client may send it back."""
    message: dict[str, Any] = {"role": "assistant"}
    text = "".join(choice.text)
    if text or not choice.calls:
        message["content"] = text
    if choice.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": arguments_object("".join(call.arguments))},
            }
            for call in choice.calls
        ]
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    return message
