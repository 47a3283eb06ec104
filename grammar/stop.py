"""Stop strings in a stream of text. The engine stops by this and the gateway cuts by this, so they agree.

What matches is defined on the whole text, whatever pieces it comes in:

- An *exempt region* runs from a begin text through the next occurrence of its end text (or to the end of the text), both
  included. The begin text that is complete first opens it; of several complete at the same character, the longest; the same
  begin text listed twice means the first listed. Regions are found from left to right and do not nest.
- A stop string *matches* where it lies wholly outside of exempt regions, and its last character was armed (see `feed`). The
  match that is complete first wins; of several complete at the same character, the longest, so that no part of a stop
  string is left standing.
- The text ends before the first match. Exempt text is text like any other.

So a stop string that touches a tool call does not cut it: `<` does not fire on `<tool_call>` where that is exempt, only on a
`<` that turns out not to begin one.

Each character costs amortised constant time (Aho and Corasick, "Efficient string matching", 1975), and characters that can
begin nothing are skipped by a compiled regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from grammar.detokenizer import Detokenizer


class _Automaton:
    """Finds the longest pattern that ends at each character. States are integers, 0 is the root; immutable once built."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of the text that the state still holds: the longest suffix that begins a pattern
        self.longest = [""]  # the longest pattern that is complete in the state, "" for none
        for pattern in patterns:
            self._insert(pattern)
        self._fail = [0] * len(self._goto)
        self._link()
        self._first = re.compile("[" + "".join(map(re.escape, self._goto[0])) + "]") if self._goto[0] else None

    def _insert(self, pattern: str) -> None:
        state = 0
        for character in pattern:
            following = self._goto[state].get(character)
            if following is None:
                following = len(self._goto)
                self._goto[state][character] = following
                self._goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.longest.append("")
            state = following
        self.longest[state] = pattern

    def _link(self) -> None:
        """Breadth first: where a state goes when no pattern goes on with the next character."""
        queue = list(self._goto[0].values())
        for state in queue:
            for character, following in self._goto[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                if not self.longest[following]:
                    self.longest[following] = self.longest[self._fail[following]]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self._goto[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def skip(self, text: str, position: int) -> int:
        """The first index from `position` on whose character can begin a pattern; len(text) where there is none."""
        found = None if self._first is None else self._first.search(text, position)
        return len(text) if found is None else found.start()


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    stops: non-empty texts. exempt: (begin text, end text) of regions where stop strings do not fire. after: the text begins in
    such a region, which ends with this ("": it does not). Memory is bounded by their lengths: no more text is held back than
    the longest stop string and the longest begin text have together.
    """

    def __init__(self, stops: Sequence[str], exempt: Sequence[tuple[str, str]] = (), after: str = "") -> None:
        if not all(stops) or not all(begin and end for begin, end in exempt):
            raise ValueError("Stop strings and the texts around exempt regions must not be empty.")
        self._never = not stops
        self._stops = _Automaton(stops)
        if self._never:
            exempt, after = (), ""  # where nothing fires, it does not matter where it would not
        self._begins = _Automaton(begin for begin, _ in exempt)
        ends: dict[str, _Automaton] = {}
        for begin, end in exempt:
            ends.setdefault(begin, _Automaton([end]))
        self._ends = ends
        # The end text waited for; None outside of exempt regions.
        self._inside: _Automaton | None = _Automaton([after]) if after else None
        self._stop_state = self._begin_state = self._end_state = 0
        self._read = 0  # characters read; positions below count from the beginning of the text
        self._held = ""  # what was read and not yet given out; ends at self._read
        self._candidate: tuple[int, int, str] | None = None  # begin, end, stop: fires unless a region opens over it
        self._matched: str | None = None
        self._finished = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once it is certain."""
        return self._matched

    @property
    def held(self) -> int:
        """Characters that were fed and are held back for now."""
        return len(self._held)

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """More text. Returns what can be given out now, and the stop string that matched.

        A stop string whose last character is fed with `armed` False does not match. After a match nothing more comes out:
        text fed then is ignored, and ("", the stop string) returned.
        """
        if self._finished or self._matched is not None:
            return "", self._matched
        if self._never:
            return text, None
        self._held += text
        base = self._read + len(text) - len(self._held)  # position of the first held character
        index = 0
        while index < len(text) and self._matched is None:
            scan = self._scan_outside if self._inside is None else self._scan_region
            index = scan(text, index, armed)
        if self._matched is not None and self._candidate is not None:
            given = self._held[: self._candidate[0] - base]
            self._held = ""
            return given, self._matched
        self._read += len(text)
        keep = self._stops.depth[self._stop_state] if self._candidate is None else self._read - self._candidate[0]
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given, None

    def finish(self) -> str:
        """The end of the text: returns what was held back. `matched` may be set by it."""
        held, self._held = self._held, ""
        if self._finished or self._matched is not None:
            return ""
        self._finished = True
        if self._candidate is None:
            return held
        begin, _, self._matched = self._candidate
        return held[: len(held) - (self._read - begin)]

    def _scan_region(self, text: str, index: int, armed: bool) -> int:
        """Reads on inside an exempt region, where nothing is armed; returns the next index."""
        end = self._inside
        while end is not None and index < len(text):
            if self._end_state == 0:
                index = end.skip(text, index)
                if index == len(text):
                    break
            self._end_state = end.step(self._end_state, text[index])
            index += 1
            if end.longest[self._end_state]:
                self._inside = end = None
                self._end_state = 0
        return index

    def _scan_outside(self, text: str, index: int, armed: bool) -> int:
        """Reads on until a region opens, a match is certain or the text ends; returns the next index."""
        stops, begins = self._stops, self._begins
        while index < len(text):
            if self._stop_state == 0 and self._begin_state == 0 and self._candidate is None:
                index = min(stops.skip(text, index), begins.skip(text, index))
                if index == len(text):
                    break
            character = text[index]
            index += 1
            position = self._read + index  # characters read so far
            self._begin_state = begins.step(self._begin_state, character)
            if self._candidate is None:
                self._stop_state = stops.step(self._stop_state, character)
                stop = stops.longest[self._stop_state]
                if stop and armed:
                    self._candidate = (position - len(stop), position, stop)
            begin = begins.longest[self._begin_state]
            if begin and (self._candidate is None or self._candidate[1] > position - len(begin)):
                self._open(begin)
                return index
            # A region that could still void the match would have begun in the characters that the begin state holds.
            if self._candidate is not None and (begin or self._candidate[1] <= position - begins.depth[self._begin_state]):
                self._matched = self._candidate[2]
                return index
        return index

    def _open(self, begin: str) -> None:
        """An exempt region begins: what could have matched overlaps it and does not."""
        self._inside = self._ends[begin]
        self._candidate = None
        self._stop_state = self._begin_state = self._end_state = 0


class TextStream:
    """Tokens to text, cut before the first stop string: a Detokenizer and a StopMatcher in one.

    min_tokens: stop strings that are complete within the text of the first `min_tokens` tokens do not match. Engine and
    gateway agree on the text and on the stop string when both feed the same tokens, in whatever chunks.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        exempt: Sequence[tuple[str, str]] = (),
        *,
        after: str = "",
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, exempt, after)
        self._unarmed = min_tokens
        self._finished = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once it is certain."""
        return self._matcher.matched

    @property
    def held(self) -> int:
        """Characters that were decoded and are held back for now."""
        return self._matcher.held

    def feed(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """More tokens. Returns the text that can be given out now, and the stop string that matched."""
        if not self._unarmed:
            return self._matcher.feed(self._detokenizer.feed(token_ids))
        unarmed = min(self._unarmed, len(token_ids))
        self._unarmed -= unarmed
        text = ""
        if unarmed:
            text = self._matcher.feed(self._detokenizer.feed(token_ids[:unarmed]), armed=False)[0]
        if unarmed < len(token_ids):
            text += self._matcher.feed(self._detokenizer.feed(token_ids[unarmed:]))[0]
        return text, self._matcher.matched

    def finish(self) -> str:
        """The end of the tokens: returns the text held back. `matched` may be set by it."""
        if self._finished:
            return ""
        self._finished = True
        return self._matcher.feed(self._detokenizer.finish(), armed=self._unarmed == 0)[0] + self._matcher.finish()
