"""What one unlimited prefix cache would give: the bound a real one is measured against.

Blocks are named by chained digests, so a block is in an unlimited cache exactly if an earlier prompt or an answer after it
had it, and every distinct block misses once. The bound hence hardly depends on how sessions interleave: only a prompt that
is found whole, and still computes its last token as every engine must to get the first output, can move one block.

Engines keep the KV of generated tokens too, and where a replay happens to generate what was recorded, the next turn finds
it. So the answers that a run gave belong to its bound; without them the bound covers prompts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prefix_cache.hashing import DEFAULT_BLOCK_SIZE, TokenIds, block_digests, namespace_digest
from traces.chat_client import ChatClient, ChatError
from traces.history import RecordedTurn
from traces.index import SessionEntry

MAX_BLOCKS = 8_000_000
MAX_ANSWER_BYTES = 128 * 1024 * 1024


class TooManyBlocks(Exception):  # noqa: N818 - the bound is not known, which is no fault
    """The trace has more distinct blocks, or its run more text in answers, than may be remembered."""


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


class GivenAnswers:
    """The messages a replay got, by session and turn, in bounded memory: what does not fit is forgotten, and that is known."""

    __slots__ = ("_answers", "_bytes", "complete", "max_bytes")

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.complete = True
        self._answers: dict[tuple[str, int], bytes] = {}
        self._bytes = 0
        self.max_bytes = max_bytes

    def add(self, session: str, turn: int, message: Mapping[str, Any]) -> None:
        encoded = msgspec.json.encode(message)
        if self._bytes + len(encoded) > self.max_bytes:
            self.complete = False
            return
        self._bytes += len(encoded)
        self._answers[(session, turn)] = encoded

    def get(self, session: str, turn: int) -> dict[str, Any] | None:
        """The message, or None where the turn failed or its answer was forgotten."""
        encoded = self._answers.get((session, turn))
        return None if encoded is None else msgspec.json.decode(encoded, type=dict[str, Any])


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
    answers: GivenAnswers | None = None,
    *,
    model: str | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    on_turn: Callable[[], None] = lambda: None,
) -> Bound:
    """The bound of a trace and of the `answers` of one run, everything tokenised by the server.

    Raises ChatError, TooManyBlocks and TraceFormatError.
    """
    if answers is not None and not answers.complete:
        raise TooManyBlocks(f"the answers of the run take more than {answers.max_bytes} bytes")
    cache = UnlimitedCache(block_size)
    turns = prompt_tokens = cached_tokens = 0
    for entry in entries:
        for turn in entry.read():
            tokens = await _tokenize(client, turn, model, None)
            cached_tokens += _add(client, cache, tokens)
            answer = answers.get(entry.session, turn.line.turn) if answers is not None else None
            if answer is not None:
                _add(client, cache, await _tokenize(client, turn, model, answer))
            turns += 1
            prompt_tokens += len(tokens)
            on_turn()
    return Bound(turns, prompt_tokens, cached_tokens)


async def _tokenize(client: ChatClient, turn: RecordedTurn, model: str | None, answer: dict[str, Any] | None) -> list[int]:
    """The prompt of a turn; with an `answer`, the conversation after it."""
    messages = turn.messages if answer is None else [*turn.messages, answer]
    body: dict[str, Any] = {"model": model or turn.line.model, "messages": messages, "add_generation_prompt": answer is None}
    if turn.tools:
        body["tools"] = turn.tools
    if (template_kwargs := turn.line.params.get("chat_template_kwargs")) is not None:
        body["chat_template_kwargs"] = template_kwargs
    return await client.tokenize(body)


def _add(client: ChatClient, cache: UnlimitedCache, tokens: list[int]) -> int:
    try:
        return cache.add(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ChatError(f"{client.base}/tokenize answered with token ids that are none: {error}") from error
