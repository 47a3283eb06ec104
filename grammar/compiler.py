"""Grammar sources to token masks. The only file that imports xgrammar (and with it torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from grammar.limits import DEFAULT_LIMITS, GrammarLimits


def allocate_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """An int32 CPU tensor [rows, ceil(vocab_size / 32)] with every token allowed (bit t of row r: token t may come next)."""
    return torch.full((rows, (vocab_size + 31) // 32), -1, dtype=torch.int32)


class GrammarMatcher:
    """Where one generation stands in its grammar. Not thread-safe."""

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Writes which tokens may come next into row `row` of an `allocate_bitmask` tensor."""
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        """Advances by one token. False, with the state unchanged, when the grammar does not allow it."""
        raise NotImplementedError

    def is_terminated(self) -> bool:
        """True once a stop token was accepted: nothing may follow."""
        raise NotImplementedError

    def fork(self) -> GrammarMatcher:
        """An independent copy that stands at the same place (n > 1)."""
        raise NotImplementedError


class CompiledGrammar:
    """A compiled grammar: immutable, shared between requests and threads."""

    @property
    def memory_bytes(self) -> int:
        """About how much memory it holds."""
        raise NotImplementedError

    def matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        raise NotImplementedError


class GrammarCompiler:
    """Compiles structural tags for one tokenizer, each source once, within limits. Thread-safe.

    `vocab_size` is the width of the model's logits, which may exceed the tokenizer's size; `stop_token_ids` end a
    generation and are allowed only where the grammar is complete.
    """

    def __init__(
        self,
        tokenizer_json_path: Path | str,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits

    def compile(self, source: str) -> CompiledGrammar:
        """The compiled grammar of a structural tag's JSON text, from the cache where it was compiled before.

        Raises GrammarRefused when the source is not a structural tag, is over the limits, or takes too long.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the probe process, if one was started. Idempotent."""
