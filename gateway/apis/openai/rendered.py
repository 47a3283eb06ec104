"""A rendered request in the shape that vLLM has for it: what routers ask a worker for, to know the tokens of a prompt."""

from __future__ import annotations

from typing import Any

from gateway.turn import Prompt, Turn
from prefix_cache.hashing import unpack_tokens


def rendered(turn: Turn, prompt: Prompt, model: str) -> dict[str, Any]:
    """One prompt. `sampling_params` holds what routers look at, no more."""
    sampling = turn.sampling
    return {
        "request_id": turn.request_id,
        "model": model,
        "token_ids": unpack_tokens(prompt.packed_token_ids).tolist(),
        "features": None,
        "sampling_params": {
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        "stream": turn.stream,
        "cache_salt": prompt.cache_salt,
        "priority": turn.priority,
    }
