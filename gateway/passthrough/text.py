"""The text of a body in chunks with chained digests: what routing goes by where nobody tokenises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.workers.opaque.client import CHUNK_TOKENS
from prefix_cache.hashing import TOKEN_BYTES, BlockHash, iter_block_digests

BYTES_PER_TOKEN = TOKEN_BYTES
"""A guess, and what makes a chunk of CHUNK_TOKENS tokens as long as a block of so many packed token ids."""


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """What of a body a server makes its prompt of, in the order in which chat templates mostly have it. A conversation that
    grows begins with the text it had before."""
    parts: list[bytes] = []
    if body.get("tools"):
        parts.append(orjson.dumps(body["tools"]))
    messages = body.get("messages")
    if isinstance(messages, list):
        parts += [orjson.dumps(message) for message in messages]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        parts.append(prompt.encode("utf-8", "surrogatepass"))
    elif prompt is not None:
        parts.append(orjson.dumps(prompt))
    return b"\n".join(parts)


_MAX_TEXT = 4 * 2**20


def chunk_digests(text: bytes, root: BlockHash) -> list[BlockHash]:
    """Digests of the full chunks, of the first 4 MiB: hashing holds up every other stream, and more does not place better."""
    return list(iter_block_digests(text[:_MAX_TEXT], root, CHUNK_TOKENS))


def answer_limit(body: Mapping[str, Any]) -> int | None:
    """Tokens that the answer may have, all choices together; None where the body does not say."""
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    choices = body.get("n") or 1
    if type(most) is not int or type(choices) is not int or most < 1 or choices < 1:
        return None
    return most * choices
