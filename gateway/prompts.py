"""Turn to Prompt: render, tokenise, hash. Small conversations at once, large ones on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from gateway.grammars import GrammarPlan, GrammarPlans
from gateway.histories.keeper import HistoryKeeper, TurnHistory, too_long
from gateway.models import ServedModel
from gateway.turn import Prompt, Turn, TurnError
from gateway.workers.protocol import WorkerInfo
from prefix_cache.hashing import JoinedDigests, block_digests, pack_tokens, root_digest
from prefix_cache.packed_tokens import PackedTokens

T = TypeVar("T")

_SCHEMA_CHARACTERS = 2048
"""What the schema of a tool counts for."""


class PromptBuilder:
    """Makes prompts for the workers' pool. Tokenising releases the GIL, so that threads really run beside the event loop."""

    def __init__(self, executor: Executor, *, inline_characters: int, keeper: HistoryKeeper | None = None) -> None:
        """`keeper`: None makes every prompt anew, from all of its text."""
        self._executor = executor
        self._inline_characters = inline_characters
        self._keeper = keeper
        self.grammars = GrammarPlans()

    async def from_turn(self, model: ServedModel, turn: Turn, info: WorkerInfo) -> tuple[Prompt, TurnHistory | None]:
        """The prompt of a chat turn, and its part in its session. Raises TurnError 400: template, grammar or context."""
        if self._keeper is not None:
            plan = await self._plan(model, turn)
            history = await self._keeper.open(model, turn, info)
            ledger = history.continuation.ledger
            before = history.continuation.predecessor
            # A conversation that began as another session's lives where it likes.
            last_instance = before.worker_instance if before is not None and history.foreign is None else ""
            prompt = Prompt(
                ledger.tokens,
                JoinedDigests(ledger.blocks),
                plan.source,
                turn.cache_salt,
                unenforced=plan.unenforced,
                last_instance=last_instance,
            )
            return prompt, history

        plan = await self._plan(model, turn)

        def build() -> Prompt:
            text = model.renderer.render(turn.messages, turn.tools, template_kwargs=turn.template_kwargs)
            prompt = self._prompt(model, text, info, turn.cache_salt, grammar=plan.source, special=False)
            return replace(prompt, unenforced=plan.unenforced)

        size = sum(_characters(message) for message in turn.messages) + 256 * len(turn.tools)
        return await self._run(build, size), None

    async def _plan(self, model: ServedModel, turn: Turn) -> GrammarPlan:
        """Made beside the event loop, unless it is known or small."""
        known = self.grammars.known(model, turn)
        if known is not None:
            return known
        return await self._run(lambda: self.grammars.of(model, turn), _SCHEMA_CHARACTERS * len(turn.tools))

    async def from_text(
        self, model: ServedModel, text: str, info: WorkerInfo, *, cache_salt: str | None, grammar: str | None, field: str
    ) -> Prompt:
        """A plain prompt, with the special tokens the tokenizer puts around a text. Raises TurnError 400."""
        return await self._run(
            lambda: self._prompt(model, text, info, cache_salt, grammar=grammar, special=True, field=field), len(text)
        )

    def from_ids(
        self,
        model: ServedModel,
        ids: Sequence[int],
        info: WorkerInfo,
        *,
        cache_salt: str | None,
        grammar: str | None,
        field: str,
    ) -> Prompt:
        """A prompt given as token ids. Raises TurnError 400."""
        vocab_size = info.vocab_size or model.tokenizer.size
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                raise TurnError(
                    400,
                    "invalid_token",
                    f"{field}[{position}]: token id {token_id} is not in the vocabulary of {vocab_size} tokens.",
                    param=field,
                )
        return self._hashed(model, pack_tokens(ids), info, cache_salt, grammar, field)

    async def tokenise_turn(self, model: ServedModel, turn: Turn, *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation, whatever its length (/tokenize). Raises TurnError 400."""

        def build() -> list[int]:
            text = model.renderer.render(
                turn.messages, turn.tools, template_kwargs=turn.template_kwargs, add_generation_prompt=add_generation_prompt
            )
            return _encoded(model, text, special=False, field="messages")

        return await self._run(build, sum(_characters(message) for message in turn.messages))

    async def tokenise_text(self, model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, whatever its length (/tokenize). Raises TurnError 400."""
        return await self._run(lambda: _encoded(model, text, special=add_special_tokens, field="prompt"), len(text))

    async def _run(self, build: Callable[[], T], size: int) -> T:
        if size <= self._inline_characters:
            return build()
        return await asyncio.get_running_loop().run_in_executor(self._executor, build)

    def _prompt(
        self,
        model: ServedModel,
        text: str,
        info: WorkerInfo,
        cache_salt: str | None,
        *,
        grammar: str | None,
        special: bool,
        field: str = "messages",
    ) -> Prompt:
        # Without this a 64 MiB text would be tokenised for half a minute only to be refused.
        at_least = len(text) // model.tokenizer.longest_token
        if at_least >= info.max_model_len:
            raise too_long(model, f"at least {at_least}", info, field)
        packed = pack_tokens(_encoded(model, text, special=special, field=field))
        return self._hashed(model, packed, info, cache_salt, grammar, field)

    def _hashed(
        self, model: ServedModel, packed: bytes, info: WorkerInfo, cache_salt: str | None, grammar: str | None, field: str
    ) -> Prompt:
        count = len(packed) // 4
        if count == 0:
            raise TurnError(400, "empty_prompt", f"{field}: the prompt has no tokens; at least one is needed.", param=field)
        if count >= info.max_model_len:
            raise too_long(model, str(count), info, field)
        root = root_digest(bytes.fromhex(info.namespace), cache_salt)
        digests = tuple(block_digests(packed, root, info.block_size))
        return Prompt(tokens=PackedTokens(packed), digests=digests, grammar=grammar, cache_salt=cache_salt)


def _encoded(model: ServedModel, text: str, *, special: bool, field: str) -> list[int]:
    try:
        return model.tokenizer.encode(text, add_special_tokens=special)
    except ValueError as error:
        raise TurnError(400, "invalid_request", f"{field}: {error}.", param=field) from error


def _characters(message: Mapping[str, object]) -> int:
    content = message.get("content")
    calls = message.get("tool_calls")
    # Arguments are objects here; their size is not worth a serialisation.
    return (len(content) if isinstance(content, str) else 0) + (1024 * len(calls) if isinstance(calls, list) else 0) + 16
