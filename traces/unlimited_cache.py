"""What one unlimited prefix cache would give: the bound a real one is measured against.

Blocks are named by chained digests, so a block is in an unlimited cache exactly if it was in an earlier prompt, and every
distinct block misses once. The bound hence does not depend on how sessions interleave, except that a prompt found whole
still computes its last token (as every engine must to get the first output), which can move one block. Generated tokens
are left out: a replay puts recorded text in the history, not what it generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefix_cache.hashing import DEFAULT_BLOCK_SIZE, TokenIds, block_digests, namespace_digest
from traces.chat_client import ChatClient, ChatError
from traces.index import SessionEntry

MAX_BLOCKS = 8_000_000


class TooManyBlocks(Exception):  # noqa: N818 - the bound is not known, which is no fault
    """The trace has more distinct blocks than may be remembered."""


class UnlimitedCache:
    """Counts the tokens one unlimited prefix cache would save, prompt by prompt."""

    def __init__(self, block_size: int = DEFAULT_BLOCK_SIZE, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._seen: set[bytes] = set()
        self._root = namespace_digest({"block_size": block_size})

    def add(self, token_ids: TokenIds) -> int:
        """Takes a prompt in and returns how many of its tokens were cached before it. Raises TooManyBlocks."""
        digests = block_digests(token_ids, self._root, self._block_size)
        found = 0
        for digest in digests:
            if digest not in self._seen:
                break
            found += 1
        self._seen.update(digests[found:])
        if len(self._seen) > self._max_blocks:
            raise TooManyBlocks(f"more than {self._max_blocks} distinct blocks of {self._block_size} tokens")
        return min(found, max(0, len(token_ids) - 1) // self._block_size) * self._block_size


@dataclass(frozen=True, slots=True)
class Bound:
    """What a trace holds (as the server tokenises it), and what one unlimited cache would save of it."""

    turns: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


async def unlimited_bound(
    client: ChatClient,
    entries: Sequence[SessionEntry],
    *,
    model: str | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    on_turn: Callable[[], None] = lambda: None,
) -> Bound:
    """The bound of a trace, every prompt tokenised by the server. Raises ChatError, TooManyBlocks and TraceFormatError."""
    cache = UnlimitedCache(block_size)
    turns = prompt_tokens = cached_tokens = 0
    for entry in entries:
        for turn in entry.read():
            body: dict[str, Any] = {"model": model or turn.line.model, "messages": turn.messages, "add_generation_prompt": True}
            if turn.tools:
                body["tools"] = turn.tools
            if (template_kwargs := turn.line.params.get("chat_template_kwargs")) is not None:
                body["chat_template_kwargs"] = template_kwargs
            tokens = await client.tokenize(body)
            try:
                cached_tokens += cache.add(tokens)
            except (TypeError, ValueError, OverflowError) as error:
                raise ChatError(f"{client.base}/tokenize answered with token ids that are none: {error}") from error
            turns += 1
            prompt_tokens += len(tokens)
            on_turn()
    return Bound(turns, prompt_tokens, cached_tokens)
