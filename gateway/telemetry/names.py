"""Attribute names of the OpenTelemetry GenAI conventions, in two generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gateway.turn import Receipt, Turn

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

PROVIDER = "turnkeep"

# What tools built before version 1.37 of the conventions look for.
_LEGACY: Mapping[str, str] = MappingProxyType(
    {
        "gen_ai.provider.name": "gen_ai.system",
        "gen_ai.usage.cache_write.input_tokens": "gen_ai.usage.cache_creation.input_tokens",
    }
)


def rename(attributes: Attributes, *, legacy: bool) -> dict[str, AttributeValue]:
    """Current names to those of the wanted generation."""
    if not legacy:
        return dict(attributes)
    return {_LEGACY.get(name, name): value for name, value in attributes.items()}


def turn_attributes(operation: str, turn: Turn) -> dict[str, AttributeValue]:
    """What is known of a turn when it begins, in current names. No text of the conversation is among it."""
    sampling = turn.sampling
    values: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": turn.session.key,
        "gen_ai.request.model": turn.model,
        "gen_ai.request.stream": turn.stream,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n != 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p if sampling.top_p != 1 else None,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "turnkeep.request.id": turn.request_id,
        "turnkeep.session.source": turn.session.source,
        "turnkeep.session.parent": turn.session.parent,
        "turnkeep.session.correlation": turn.session.correlation,
        "turnkeep.session.conflicts": turn.session.conflicts or None,
        "turnkeep.session.final": turn.session.final or None,
        "turnkeep.request.tools": len(turn.tools) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def route_outcome(receipts: Sequence[Receipt]) -> dict[str, str | int | float]:
    """What became of the choice of a worker, of the last prompt where there were several; what is not known is absent."""
    decision = receipts[-1].decision if receipts else None
    if decision is None:
        return {}
    outcome, shadow = decision.outcome, decision.shadow
    values: dict[str, str | int | float | None] = {
        "turnkeep.route.result": outcome.result,
        "turnkeep.route.cached_tokens": outcome.cached_tokens,
        "turnkeep.route.queue_seconds": outcome.queue_seconds,
        "turnkeep.route.observed_seconds": outcome.time_to_first_token,
        "turnkeep.route.regret_seconds": outcome.regret,
        "turnkeep.route.shadow_policy": shadow.policy if shadow is not None else None,
        "turnkeep.route.shadow_replica": shadow.worker if shadow is not None else None,
    }
    return {name: value for name, value in values.items() if value is not None}
