"""The tokens that the text a grammar forces is likely to be written in."""

from __future__ import annotations

from collections import OrderedDict

from grammar.compiler import GrammarMatcher

_KEPT = 4096
"""Texts: keys and names of tools, and the rests of them."""


class ForcedText:
    """Remembers how texts are spelled: spelling one takes several times as long as finding that it is forced."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def tokens(self, matcher: GrammarMatcher) -> tuple[int, ...]:
        """Where the matcher stands; empty where nothing is forced. The model may spell it otherwise."""
        text = matcher.forced_text()
        if not text:
            return ()
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = tuple(matcher.jump())
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(text)
        return known
