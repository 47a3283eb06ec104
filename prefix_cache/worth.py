"""What a block is worth that nobody uses right now, from the first to be given up to the last."""

from __future__ import annotations

SUPERSEDED = 0
"""Nobody will ask for it again: a rewritten history, a closed session."""

IDLE = 1
"""Of a session of which nobody knows whether it comes back."""

WAITING = 2
"""Of a session that waits for a tool, and is expected back."""

SHARED = 3
"""Several sessions begin with it: tools, system prompts."""

PINNED = 4
"""Somebody asked for it to be kept."""
