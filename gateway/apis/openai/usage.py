"""Usage in OpenAI's shape, with what the gateway adds."""

from __future__ import annotations

from typing import Any

from gateway.running import RunningTurn


def usage_body(running: RunningTurn) -> dict[str, Any]:
    """Token counts; `turnkeep` says which replica computed them, for which session."""
    usage, session = running.usage, running.session
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": running.reasoning_tokens},
        "turnkeep": {"replica": running.workers, "session": session.key, "session_source": session.source},
    }
