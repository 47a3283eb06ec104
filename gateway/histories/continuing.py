"""One turn and the ledger that it goes on from to a continuation: gateway.histories.builder says by which ways."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.histories.growth import Growth
from gateway.histories.matching import Match, TurnText
from gateway.histories.pieces import Before, PieceRenderer
from gateway.histories.splicing import Frame, Returned, any_reasoning, find_returned, frame_of, generated_text, reasoning_of
from gateway.turn import Turn
from prefix_cache.hashing import TOKEN_BYTES, list_tokens
from prefix_cache.packed_tokens import PackedTokens
from sessions.continuation import Continuation, Divergence, Path
from sessions.digests import split_reasoning
from sessions.ledger import SPAN_BYTES, Ledger, Span, extend_blocks, pack_spans, text_digest

if TYPE_CHECKING:
    from gateway.histories.builder import HistoryBuilder

log = logging.getLogger(__name__)

_MAX_GROUP = 8
_MAX_TAIL = 4096


class PromptTooLongError(Exception):
    """The prompt has at least `tokens` tokens, which is more than the context holds."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the prompt has at least {tokens} tokens")
        self.tokens = tokens


class _NotSplicedError(Exception):
    """Why an answer whose text was completed is not spliced, in a word of docs/sessions.md."""


class Work:
    """One turn on its way to a prompt."""

    def __init__(
        self,
        builder: HistoryBuilder,
        turn: Turn,
        text: TurnText,
        match: Match | None,
        root: bytes,
        block_size: int,
        max_tokens: int,
    ) -> None:
        self._builder = builder
        self._cutter = builder.cutter
        self._turn = turn
        self._text = text
        self._match = match
        self._root = root
        self._block_size = block_size
        self._max_tokens = max_tokens
        scope = (text.kwargs_name, text.volatile)
        self._pieces = PieceRenderer(
            builder.model.renderer, turn.tools, turn.template_kwargs, outlines=builder.outlines, scope=scope
        )
        self._before: Before | None = None
        self._messages: list[Mapping[str, Any]] = list(turn.messages)
        self._returned: Returned | None = None
        self._fallbacks: list[str] = []
        self._tokenised = 0
        self._spliced = 0

    def continuation(self) -> Continuation:
        if self._cutter.refusal is not None:
            return self._as_text("tokenizer")
        match = self._match
        if match is None or not match.continues(self._text):
            return self._by_whole(match)
        if self._text.count == match.messages:
            return self._again(match.ledger)
        self._find_returned(match.ledger)
        try:
            return self._onwards(match)
        except _NotSplicedError as error:
            # Its text was made with the reasoning put back, which is only right around the generated ids.
            self._fallbacks = [*self._fallbacks, str(error)]
            self._returned = None
            self._before = None
            self._messages = list(self._turn.messages)
            return self._onwards(match)

    def _onwards(self, match: Match) -> Continuation:
        old = match.ledger
        if old.end_of(old.num_spans).messages == match.messages:
            made = self._by_tail(match)
            if made is not None:
                return made
        return self._by_whole(match)

    def _again(self, old: Ledger) -> Continuation:
        """The same prompt once more."""
        return Continuation(
            ledger=old, path="tail", predecessor=old, matched_messages=old.num_messages, reused_tokens=old.num_tokens
        )

    def _find_returned(self, old: Ledger) -> None:
        at = old.num_messages
        found = find_returned(
            self._turn.messages[at], old.pending, self._builder.model.tokenizer, restore=self._builder.restores_reasoning
        )
        if isinstance(found, str):
            if found != "nothing_generated":
                self._fallbacks.append(found)
            return
        self._returned = found
        self._messages[at] = found.message

    def _by_tail(self, match: Match) -> Continuation | None:
        old = match.ledger
        start = match.messages
        if not self._builder.goes_by_tail(self._turn, self._text, match):
            self._fallbacks.append("template_unstable")
            return None
        self._before = self._pieces.before(self._messages, start)
        text = self._pieces.behind(self._before, self._messages[start:], prompt=True)
        if text is None or not self._cutter.starts(text):
            self._fallbacks.append("template_unstable")
            return None
        if self._builder.is_check():
            return self._by_whole(self._match, tail=text)
        return self._grown(old, old.num_spans, text, old, "tail")

    def _by_whole(self, match: Match | None, tail: str | None = None) -> Continuation:
        """`tail`: what the tail way found, to be compared."""
        old = None if match is None else match.ledger
        if old is not None and old.reasoned and self._builder.restores_reasoning and match is not None:
            self._restore_old(old, match.messages)
        whole = self._pieces.whole(self._messages)
        base, spans = self._empty(), 0
        text = whole
        if old is not None and match is not None:
            spans, characters = self._walk(old, whole, match.messages)
            if spans:
                base, text = old, whole[characters:]
        if tail is not None and old is not None:
            self._compared(spans == old.num_spans and text == tail)
        if old is None or base.end_of(spans).messages != old.num_messages:
            self._give_up("history_changed")
        return self._grown(base, spans, text, old, "whole" if old is not None else "new")

    def _compared(self, agree: bool) -> None:
        """Both ways were gone."""
        if agree:
            self._builder.agreed()
            return
        self._builder.stability.distrust()
        self._fallbacks.append("template_distrusted")
        log.warning(
            "The chat template of %s renders new messages differently without the old ones; from now on it renders all of "
            "them every turn. Prompts stay right and cost more.",
            self._turn.model,
        )

    def _restore_old(self, old: Ledger, shared: int) -> None:
        """Puts the reasoning back into answers of earlier turns whose ids hold it."""
        start = 0
        for span in old.iter_spans():
            if span.messages > shared:
                return
            if span.generated:
                message = self._messages[span.messages - 1]
                if reasoning_of(message) is None:
                    ids = list_tokens(old.tokens.part(start, span.tokens))
                    said = self._builder.model.tokenizer.decode(ids).removeprefix(old.tail)
                    thought = split_reasoning(said)[0]
                    if thought:
                        content = thought + (message.get("content") or "")
                        self._messages[span.messages - 1] = {**message, "content": content}
            start = span.tokens

    def _walk(self, old: Ledger, whole: str, shared: int) -> tuple[int, int]:
        """How many spans of `old` stand at the beginning of `whole`, and how many characters they take."""
        encoded = whole.encode("utf-8", "surrogatepass")
        at = spans = 0
        for span in old.iter_spans():
            if span.messages > shared or text_digest(encoded[at : span.text_bytes]) != span.text_hash:
                break
            at = span.text_bytes
            spans += 1
        characters = len(encoded[:at].decode("utf-8", "surrogatepass"))
        if spans and not self._cutter.may_cut(whole, characters):
            return 0, 0
        return spans, characters

    def _grown(self, base: Ledger, spans: int, text: str, old: Ledger | None, path: Path) -> Continuation:
        """The first `spans` spans of `base` with those of `text`, which goes from their end to the end of the prompt."""
        end = base.end_of(spans)
        at_least = end.tokens + len(text) // self._builder.model.tokenizer.longest_token
        if at_least >= self._max_tokens:
            raise PromptTooLongError(at_least)
        grown = Growth(end, self._cutter)
        position = self._splice(grown, text, old)
        closed = self._close(grown, text, position, old.tail) if path == "tail" and old is not None else None
        if closed is None:
            closed = self._cut(grown, text, position)
        rest = text[closed:]
        tail_ids = self._cutter.encode(rest)
        self._tokenised = grown.tokenised + len(tail_ids) // TOKEN_BYTES
        tokens, blocks = base.extended(spans, (*grown.ids, tail_ids))
        ledger = msgspec.structs.replace(
            base,
            context=self._text.context,
            messages=self._text.digests,
            spans=base.spans[: spans * SPAN_BYTES] + pack_spans(grown.spans),
            tokens=tokens,
            blocks=blocks,
            tail=rest if len(rest) <= _MAX_TAIL else "",
            pending=(),
            generated_tokens=base.generated_within(spans) + self._spliced,
            reasoned=(old is not None and spans > 0 and old.reasoned)
            or (self._returned is not None and bool(self._returned.reasoning))
            or self._reasons(end.messages),
            odd=None if self._match is None else self._match.odd,
        )
        divergence = None if old is None else self._divergence(spans, end, old, ledger)
        return Continuation(
            ledger=ledger,
            path=path,
            predecessor=old,
            matched_messages=end.messages + (1 if self._spliced else 0),
            reused_tokens=end.tokens + self._spliced,
            spliced_tokens=self._spliced,
            tokenised_tokens=self._tokenised,
            divergence=divergence,
            fallbacks=tuple(self._fallbacks),
            new_text="" if divergence is None else text,
        )

    def _reasons(self, start: int) -> bool:
        """Whether the messages from `start` on hold reasoning."""
        match = self._match
        if match is not None and match.reasons is not None and match.messages == start:
            return match.reasons
        return any_reasoning(self._turn.messages[start:])

    def _give_up(self, reason: str) -> None:
        """The answer is not spliced after all. Raises _NotSplicedError where the text must be made again without it."""
        returned, self._returned = self._returned, None
        if returned is None or self._match is None:
            return
        if returned.message is not self._turn.messages[self._match.ledger.num_messages]:
            raise _NotSplicedError(reason)

    def _splice(self, grown: Growth, text: str, old: Ledger | None) -> int:
        """The answer that came back, as it was generated. Returns how much of `text` that is."""
        if self._returned is None or old is None:
            return 0
        start = old.num_messages
        opening = old.tokens.part(old.end_of(old.num_spans).tokens)
        frame: Frame | str = "opening_changed"
        if bool(opening) == bool(old.tail):  # else the text before the answer was too long to be kept
            said = partial(generated_text, self._returned.generated, self._builder.model.tokenizer)
            before = self._before or self._pieces.before(self._messages, start)
            frame = frame_of(self._returned, said, text, old.tail, self._messages[start:], before, self._pieces, self._cutter)
        if isinstance(frame, str):
            self._give_up(frame)
            self._fallbacks.append(frame)
            return 0
        generated = self._returned.generated
        grown.add_ids(opening + generated.token_ids, known=True)
        grown.add_text(text[frame.after : frame.end])
        grown.end_span(start + 1, text[: frame.end], generated.meaning)
        self._spliced = len(generated.token_ids) // TOKEN_BYTES
        return frame.end

    def _close(self, grown: Growth, text: str, position: int, opening: str) -> int | None:
        """The rest of the messages as one span, up to the generation prompt `opening`. None where that is not to be seen."""
        end = len(text) - len(opening)
        if not (opening and end > position and text.endswith(opening) and self._cutter.starts(opening)):
            return None
        body = text[position:end]
        grown.add_text(body)
        grown.end_span(len(self._messages), body)
        return end

    def _cut(self, grown: Growth, text: str, position: int) -> int:
        """Cuts `text` into spans for as long as the template lets. Returns where that ends."""
        count = len(self._messages)
        start = grown.messages
        while start < count:
            for end in range(start + 1, min(start + _MAX_GROUP, count) + 1):
                piece = self._pieces.part(self._messages, start, end)
                if piece and text.startswith(piece, position) and self._cutter.may_cut(text, position + len(piece)):
                    break
            else:
                closed = self._close(grown, text, position, self._pieces.opening(self._messages))
                if closed is None:
                    self._fallbacks.append("template_uncut")
                return position if closed is None else closed
            grown.add_text(piece)
            grown.end_span(end, piece)
            position += len(piece)
            start = end
        return position

    def _divergence(self, spans: int, end: Span, old: Ledger, new: Ledger) -> Divergence | None:
        """Of `new`, which begins with the first `spans` spans of `old`, up to `end`."""
        match = self._match
        if match is None:
            return None
        if match.messages < old.num_messages:
            cause = "shorter" if match.messages == self._text.count else "message"
            message = match.messages
        elif spans < old.num_spans:
            cause = "context" if old.context != self._text.context else "template"
            message = end.messages
        elif self._spliced:
            return None  # the answer stands behind what stood before it
        elif old.pending:
            cause, message = "generated", old.num_messages
        elif not new.tokens.starts_with(old.tokens):
            cause, message = "template", old.num_messages
        else:
            return None
        tokens = new.tokens.common(old.tokens)
        return Divergence(cause, message, tokens, end.text_bytes, max(old.num_tokens + old.longest_answer - tokens, 0))  # type: ignore[arg-type]

    def _as_text(self, reason: str) -> Continuation:
        """Rendered and tokenised as a whole; the ledger is good for identifying the session and no more."""
        text = self._pieces.whole(self._messages)
        longest = self._builder.model.tokenizer.longest_token
        if len(text) // longest >= self._max_tokens:
            raise PromptTooLongError(len(text) // longest)
        tokens = PackedTokens(self._cutter.encode(text))
        blocks = extend_blocks(b"", tokens, self._root, self._block_size)
        ledger = msgspec.structs.replace(self._empty(), messages=self._text.digests, tokens=tokens, blocks=blocks)
        return Continuation(ledger=ledger, path="text", tokenised_tokens=len(tokens), fallbacks=(reason,))

    def _empty(self) -> Ledger:
        return Ledger(context=self._text.context, root=self._root, block_size=self._block_size)
