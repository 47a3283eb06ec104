"""Log-probabilities in the two shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.tokenization import TextTokenizer
from gateway.workers.protocol import TokenLogprob

LEAST = -9999.0
"""What OpenAI writes for a token that cannot come; JSON has no infinity."""


def chat_logprobs(tokenizer: TextTokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`content`: one entry a token, with its bytes, which are exact also inside a character."""
    content = [
        {
            **_entry(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LEAST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(tokenizer: TextTokenizer, logprobs: Iterable[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Parallel lists, as Completions has them, and the offset after the last token. `offset`: characters before the first."""
    tokens: list[str] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for item in logprobs:
        text = _name(tokenizer, item.token_id)
        tokens.append(text)
        chosen.append(max(item.logprob, LEAST))
        alternatives = {_name(tokenizer, token_id): max(logprob, LEAST) for token_id, logprob in item.top}
        alternatives.setdefault(text, max(item.logprob, LEAST))
        top.append(alternatives)
        offsets.append(offset)
        offset += len(tokenizer.token_text(item.token_id))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}, offset


def _name(tokenizer: TextTokenizer, token_id: int) -> str:
    """A token's text; `bytes:\\xe2\\x82` where it is a part of a character, as OpenAI writes it."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
