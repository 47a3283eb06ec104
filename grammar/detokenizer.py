"""Token ids to text as they come, equal to decoding all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class Detokenizer:
    """Skeleton: see the methods."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._sent = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """More tokens; returns the text that is now certain, which never ends in half a character."""
        self._ids.extend(token_ids)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        new = "" if text.endswith("\ufffd") else text[self._sent :]
        self._sent += len(new)
        return new

    def finish(self) -> str:
        """The end: returns the text held back; incomplete bytes become U+FFFD."""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return text[self._sent :]

    def fresh(self) -> Detokenizer:
        """An empty one for the same tokenizer; cheap."""
        return Detokenizer(self._tokenizer, self._skip)
