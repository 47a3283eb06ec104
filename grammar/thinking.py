"""How the reasoning at the beginning of an answer is marked, and how long it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What a model's chat template writes around reasoning, and between it and the answer. `special`: both are special tokens
    of the tokenizer."""

    begin: str = "<think>"
    end: str = "</think>"
    after: str = ""
    special: bool = False


_KNOWN = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))


def thinking_tags(chat_template: str | None, special_tokens: frozenset[str] = frozenset()) -> ThinkingTags | None:
    """The tags that a template speaks of; None for one that knows no reasoning."""
    template = chat_template or ""
    for begin, end in _KNOWN:
        if begin in template or end in template:
            apart = any(f"{end}{line}{line}" in template for line in ("\n", "\\n"))
            return ThinkingTags(begin, end, "\n\n" if apart else "", {begin, end} <= special_tokens)
    return None


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning of one turn. `state`: what the prompt ends with. `open`: the answer begins within the region. `possible`:
    it may begin with one. `budget`: tokens after which the region must end (None: any number). `tags` None: the format has
    ways of its own (channels)."""

    state: Literal["open", "possible"]
    tags: ThinkingTags | None = ThinkingTags()
    budget: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Texts that have no place in the answer."""
        return () if self.tags is None or self.tags.special else (self.tags.begin, self.tags.end)
