"""Whether an assistant message that came back is what was generated here, and its ids in the frame the template gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.histories.cutting import Cutter
from gateway.histories.pieces import Before, PieceRenderer
from gateway.tokenization import TextTokenizer
from prefix_cache.hashing import list_tokens
from sessions.digests import meaning_digest, split_reasoning
from sessions.ledger import Generated

_SENTINEL = "zq7generated"
_ALIKE = 12


class Returned(NamedTuple):
    """An answer that came back. `message`: as it is rendered, with the reasoning put back that its client dropped. `reasoning`:
    the text of the thinking region that the template must keep, "" for none."""

    generated: Generated
    message: Mapping[str, Any]
    reasoning: str


class Frame(NamedTuple):
    """Where the generated ids go: the answer's span is `text[:end]`, and what follows them in it is `text[after:end]`."""

    after: int
    end: int


def find_returned(
    message: Mapping[str, Any], pending: Sequence[Generated], tokenizer: TextTokenizer, *, restore: bool
) -> Returned | str:
    """The one of `pending` that `message` means, or why there is none (a word of docs/sessions.md)."""
    if not pending:
        return "nothing_generated"
    if message["role"] != "assistant":
        return "answer_left_out"
    meaning = meaning_digest(message)
    generated = next((item for item in pending if item.meaning == meaning), None)
    if generated is None:
        return "answer_edited"
    if generated.cut and not _is_plain(message, generated, tokenizer):
        return "answer_cut"
    if not generated.reasoning:
        return Returned(generated, message, "")
    thought, _ = split_reasoning(generated_text(generated, tokenizer))
    kept = reasoning_of(message)
    if kept is None:
        if not restore:
            return "reasoning_dropped"
        content = message.get("content") or ""
        return Returned(generated, {**message, "content": thought + content}, inner_text(thought))
    if kept.strip() != inner_text(thought):
        return "answer_edited"
    return Returned(generated, message, inner_text(thought))


def _is_plain(message: Mapping[str, Any], generated: Generated, tokenizer: TextTokenizer) -> bool:
    """Whether an answer that was ended in the middle is words to its end. Ids that end within a call or a thinking region would
    leave it open in the prompt, while the template closes what it writes."""
    if message.get("tool_calls"):
        return False
    words = split_reasoning(generated_text(generated, tokenizer))[1]
    return words.strip() == split_reasoning(message.get("content") or "")[1].strip()


def generated_text(generated: Generated, tokenizer: TextTokenizer) -> str:
    """What was generated, as text."""
    return tokenizer.decode(list_tokens(generated.token_ids))


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning that a client sent with a message, in whichever place; None for none."""
    given = message.get("reasoning_content")
    if given:
        return str(given)
    thought = split_reasoning(message.get("content") or "")[0]
    return inner_text(thought) if thought else None


def any_reasoning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a client sent reasoning with one of these."""
    return any(reasoning_of(message) is not None for message in messages)


def inner_text(thought: str) -> str:
    """A thinking region without its tags and outer white space."""
    return thought.strip().removesuffix("</think>").strip().removeprefix("<think>").strip()


def frame_of(
    returned: Returned,
    said: Callable[[], str],
    text: str,
    opening: str,
    messages: Sequence[Mapping[str, Any]],
    before_them: Before,
    pieces: PieceRenderer,
    cutter: Cutter,
) -> Frame | str:
    """The place of the generated ids in `text`, or why there is none. `text` is what the template writes from the answer, the
    first of `messages`, to the end of the prompt; `opening` stood before the ids when they were generated; `said` gives
    their text.

    The answer is rendered once more with a sentinel for all it says. Where the sentinel's surroundings are those of the answer,
    what lies between is what was said.
    """
    if not text.startswith(opening):
        return "opening_changed"
    blank = {"role": "assistant", "content": _SENTINEL}
    framed = pieces.behind(before_them, [blank, *messages[1:]], prompt=True)
    closing = None
    if framed is not None and framed.count(_SENTINEL) == 1:
        before, _, after = framed.partition(_SENTINEL)
        if not _begins_alike(before, opening):
            return "opening_changed"
        if text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text):
            closing = len(text) - len(after)
    if closing is None:
        # Some templates write calls in another frame than words.
        alone = pieces.behind(before_them, messages[:1])
        if alone is None or not text.startswith(alone):
            return "template_frame"
        closing = cutter.last_end(alone, len(opening))
        if closing is None:
            return "template_frame"
        written, generated = alone[len(opening) : closing].lstrip(), said().lstrip()
        if written[:_ALIKE] != generated[:_ALIKE]:
            return "opening_changed"
    end = cutter.end_of_turn(text, closing)
    if end is None or closing < len(opening):
        return "template_frame"
    if returned.reasoning and returned.reasoning not in text[len(opening) : closing]:
        return "reasoning_stripped"
    return Frame(closing, end)


def _begins_alike(before: str, opening: str) -> bool:
    """Whether the template writes before an answer what stood there when it was generated: not so for a template that has no
    generation prompt and begins an answer with a header. White space more is the model's own to write."""
    if before.startswith(opening):
        return not before[len(opening) :].strip()
    return opening.startswith(before)
