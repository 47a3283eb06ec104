"""For which templates and turns new messages may be rendered without the old ones, found by trying.

Two things must hold. What the template wrote for the old messages must stay as it is (not so where it strips the reasoning of
past turns when a user speaks again, or moves the tools before the last user message). And the new messages must render behind
a skeleton of the old ones as behind all of them. Both are tried on a family of conversations, for every place where they
can be cut, and the answers are kept by what distinguishes turns: who spoke last, who speaks now, whether calls and reasoning
occur. A turn of a kind that no conversation of the family has is rendered whole, and so is one in which a user says what the
template looks for in texts: Qwen3's takes a user's `<tool_response>` for a result, which decides what becomes of reasoning
elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.histories.pieces import Messages, PieceRenderer
from gateway.rendering import ChatRenderer
from gateway.turn import TurnError
from grammar.tools import Tool

_MAX_VARIANTS = 64
_MAX_NEW = 3
_TOOL = Tool("zq7tool", "zq7tool", {"type": "object", "properties": {"x": {"type": "string"}}})


class TurnKind(NamedTuple):
    """What distinguishes turns for a template: who spoke before the new messages, the roles of these in order, with those of
    several results once, and whether calls are among them."""

    last: str
    new: tuple[str, ...]
    calls: bool

    @classmethod
    def of(cls, messages: Messages, start: int) -> TurnKind:
        """The kind of a turn whose new messages are `messages[start:]`, `start` > 0."""
        roles: list[str] = []
        for message in messages[start:]:
            if not roles or roles[-1] != "tool" or message["role"] != "tool":
                roles.append(message["role"])
        last = messages[start - 1]
        speaker = last["role"] + ("+calls" if "tool_calls" in last else "")
        return cls(speaker, tuple(roles), any("tool_calls" in message for message in messages[start:]))


class Stability:
    """Answers for one model's templates, found when first asked and kept. Safe to use from several threads."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._answers: dict[object, Mapping[TurnKind, bool]] = {}
        self._lock = threading.Lock()
        self._distrusted = False
        self._words = tuple(renderer.content_words())

    def is_odd(self, messages: Messages) -> bool:
        """Whether a user says what the template looks for in texts."""
        if not self._words:
            return False
        texts = (message.get("content") for message in messages if message["role"] == "user")
        return any(word in text for text in texts if isinstance(text, str) for word in self._words)

    def distrust(self) -> None:
        """A turn of a kind that passed all tries was not as expected: from now on everything is rendered whole."""
        self._distrusted = True

    def holds(self, kind: TurnKind, *, tools: bool, reasoning: bool, kwargs: Mapping[str, Any], kwargs_name: bytes) -> bool:
        """Whether a turn of this kind may be rendered without its history. `reasoning`: some message has some. `kwargs_name`
        stands for `kwargs`."""
        if self._distrusted:
            return False
        answers = self.answers(tools=tools, reasoning=reasoning, kwargs=kwargs, kwargs_name=kwargs_name)
        return answers.get(kind, False)

    def is_known(self, tools: bool, kwargs_name: bytes) -> bool:
        """Whether `holds` answers at once."""
        answers = self._answers
        known = (tools, False, kwargs_name) in answers and (tools, True, kwargs_name) in answers
        return known or len(answers) >= _MAX_VARIANTS or self._distrusted

    def answers(
        self, *, tools: bool, reasoning: bool, kwargs: Mapping[str, Any], kwargs_name: bytes
    ) -> Mapping[TurnKind, bool]:
        """What is known of all kinds. Takes some 100 ms the first time."""
        key = (tools, reasoning, kwargs_name)
        found = self._answers.get(key)
        if found is not None:
            return found
        with self._lock:
            answers = self._answers.get(key)
            if answers is None:
                if len(self._answers) >= _MAX_VARIANTS:
                    return {}  # clients choose template variables: trying must not be had for the asking
                answers = _try(PieceRenderer(self._renderer, (_TOOL,) if tools else (), kwargs), tools, reasoning)
                self._answers[key] = answers
            return answers


def _try(pieces: PieceRenderer, tools: bool, reasoning: bool) -> Mapping[TurnKind, bool]:
    answers: dict[TurnKind, bool] = {}
    for conversation in _conversations(tools, reasoning):
        for start in range(1, len(conversation)):
            for end in range(start + 1, min(start + 1 + _MAX_NEW, len(conversation)) + 1):
                kind = TurnKind.of(conversation[:end], start)
                if answers.get(kind) is False:
                    continue
                outcome = _agrees(pieces, conversation[:end], start)
                if outcome is not None:
                    answers[kind] = outcome
    return answers


def _agrees(pieces: PieceRenderer, conversation: Messages, start: int) -> bool | None:
    """None: the template does not take this conversation, so no turn can be like it."""
    try:
        whole = pieces.whole(conversation)
    except TurnError:
        return None
    try:
        before = pieces.whole(conversation[:start], prompt=False)
    except TurnError:
        return False
    part = pieces.part(conversation, start, len(conversation), prompt=True)
    return part is not None and whole == before + part


def _conversations(tools: bool, reasoning: bool) -> Iterator[list[dict[str, Any]]]:
    """Rounds of a user's question, calls with their results, and an answer; long enough that the skeleton leaves out much."""
    shapes: Sequence[Sequence[Sequence[int]]] = (
        [[], [], []],
        *([[[1], [1, 1], []], [[2], [1, 3]]] if tools else []),
    )
    for system in (False, True):
        for number, shape in enumerate(shapes):
            yield list(_conversation(system, shape, bool(number % 2) is system, reasoning))


def _conversation(system: bool, shape: Sequence[Sequence[int]], talkative: bool, reasoning: bool) -> Iterator[dict[str, Any]]:
    number = 0
    if system:
        yield {"role": "system", "content": "s0"}
    for rounds, steps in enumerate(shape):
        yield {
            "role": "user",
            "content": f"u{rounds} and more words than a skeleton keeps, so that something is left out of it",
        }
        for calls in steps:
            ids = [f"call{number + at:05d}" for at in range(calls)]
            number += calls
            message: dict[str, Any] = {"role": "assistant"}
            if talkative:
                message["content"] = f"c{number}"
            message["tool_calls"] = [
                {"type": "function", "id": name, "function": {"name": _TOOL.name, "arguments": {"x": name}}} for name in ids
            ]
            yield {**message, **({"reasoning_content": f"r{number}"} if reasoning else {})}
            for name in ids:
                yield {"role": "tool", "tool_call_id": name, "name": _TOOL.name, "content": f"t{name}"}
        yield {"role": "assistant", "content": f"a{rounds}", **({"reasoning_content": f"q{rounds}"} if reasoning else {})}
