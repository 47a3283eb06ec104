"""Recorded sessions, turn by turn: where a prompt stops being its predecessor's continuation, and why.

What is compared is text, rendered and tokenised with a model's template: what any prefix cache would lose, whoever served the
session. Our own gateway forgives more (docs/sessions.md): it knows the ids of what it generated itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.apis.openai.chat_request import parse_chat
from gateway.models import ServedModel
from gateway.rendering import tool_dict
from gateway.turn import SessionRef, Turn, TurnError
from prefix_cache.hashing import pack_tokens, unpack_tokens
from prefix_cache.packed_tokens import PackedTokens
from sessions.explain.causes import Cause, Difference, first_difference
from sessions.explain.conversation import Conversation
from sessions.explain.misses import Miss
from traces.history import RecordedTurn

BLOCK_SIZE = 16
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class ExplainedTurn:
    """A turn of a session. `prompt_tokens`: of its prompt, as it is tokenised here, and as the server counted it where the miss
    is by the server's counts; `shared_tokens`: that its predecessor had, its answer among them.
    `miss`: None where nothing was lost. `problem`: why the turn could not be looked at."""

    session: str
    turn: int
    prompt_tokens: int = 0
    shared_tokens: int = 0
    miss: Miss | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Left:
    """What a turn left behind: its conversation with the answer, and the ids of both. `recorded_tokens`: of its prompt alone,
    as the server counted them: the ids of an answer need not be those of its text."""

    conversation: Conversation
    tokens: bytes
    recorded_tokens: int | None


class Explainer:
    """Explains the sessions of recordings with one model's template and tokenizer.

    `tokens_per_second`: of prefill, for the seconds that a miss costs; None takes what each session's own timings say.
    """

    def __init__(self, model: ServedModel, *, excerpts: bool = True, tokens_per_second: float | None = None) -> None:
        self._model = model
        self._excerpts = excerpts
        self._given_rate = tokens_per_second

    def session(self, name: str, turns: Iterable[RecordedTurn]) -> Iterator[ExplainedTurn]:
        """Each turn of a session, in order."""
        left: _Left | None = None
        rate = _Rate(self._given_rate)
        for recorded in turns:
            try:
                turn = self._parsed(recorded)
                prompt = self._tokens(turn, turn.messages, add_generation_prompt=True)
                explained = self._explained(name, recorded, turn, prompt, left, rate)
                rate.add(recorded)
                left = self._left(recorded, turn, prompt)
            except TurnError as error:
                explained = ExplainedTurn(name, recorded.line.turn, problem=error.message)
                left = None
            yield explained

    def _parsed(self, recorded: RecordedTurn, more: Iterable[Mapping[str, Any]] = ()) -> Turn:
        line = recorded.line
        body: dict[str, Any] = {**line.params, "messages": [*recorded.messages, *more]}
        if recorded.tools:
            body["tools"] = list(recorded.tools)
        turn, _ = parse_chat(
            body, model=self._model, session=SessionRef("", None), request_id="", max_choices=MAX_CHOICES, warnings=[]
        )
        return turn

    def _tokens(self, turn: Turn, messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool) -> bytes:
        text = self._model.renderer.render(
            tuple(messages), turn.tools, template_kwargs=turn.template_kwargs, add_generation_prompt=add_generation_prompt
        )
        try:
            return pack_tokens(self._model.tokenizer.encode(text, add_special_tokens=False))
        except ValueError as error:
            raise TurnError(400, "invalid_request", f"messages: {error}.") from error

    def _left(self, recorded: RecordedTurn, turn: Turn, prompt: bytes) -> _Left:
        answer = self._parsed(recorded, (recorded.line.assistant,)).messages[-1]
        try:
            tokens = self._tokens(turn, (*turn.messages, answer), add_generation_prompt=False)
        except TurnError:
            tokens = prompt  # a template that takes no conversation which ends with an answer
        usage = recorded.line.usage
        return _Left(_conversation(recorded, turn, answer), tokens, usage.prompt_tokens if usage is not None else None)

    def _explained(
        self, name: str, recorded: RecordedTurn, turn: Turn, prompt: bytes, left: _Left | None, rate: _Rate
    ) -> ExplainedTurn:
        number, count = recorded.line.turn, len(prompt) // 4
        if left is None:
            return ExplainedTurn(name, number, count)
        shared = PackedTokens(left.tokens).common(PackedTokens(prompt))
        # What the predecessor had and this turn has not is no loss: nobody computes it again.
        lost = min(len(left.tokens) // 4, count) - shared
        difference = first_difference(left.conversation, _conversation(recorded, turn))
        cause: Cause | None = None
        if difference is not None and lost >= BLOCK_SIZE:
            cause = difference.cause
        elif difference is None and lost >= BLOCK_SIZE:
            cause = "template"
        elif (gone := _evicted(recorded, left)) > BLOCK_SIZE and recorded.line.usage is not None:
            # All of it by the server's count, which may have been made with another tokenizer than this one.
            cause, lost, count = "evicted", gone, recorded.line.usage.prompt_tokens
        if cause is None:
            return ExplainedTurn(name, number, count, shared)
        seen = difference if difference is not None and cause == difference.cause else Difference(cause, "", None, 0, "", "")
        text = self._model.tokenizer.decode(unpack_tokens(prompt)[:shared].tolist())
        miss = Miss(
            request_id=f"{name}#{number}",
            at=0.0,
            cause=cause,
            path=seen.path,
            message=seen.message,
            field_bytes=seen.offset,
            text_bytes=len(text.encode("utf-8", "surrogatepass")) if cause != "evicted" else 0,
            tokens=shared,
            lost_tokens=lost,
            lost_seconds=rate.seconds(lost),
            before=seen.old if self._excerpts else "",
            after=seen.new if self._excerpts else "",
        )
        return ExplainedTurn(name, number, count, shared, miss)


class _Rate:
    """Seconds of prefill a token, as a session's own timings say: time to the first token over the tokens computed."""

    def __init__(self, given: float | None) -> None:
        self._given = given
        self._seconds = 0.0
        self._tokens = 0

    def add(self, recorded: RecordedTurn) -> None:
        usage, timing = recorded.line.usage, recorded.line.timing
        if usage is None or usage.cached_tokens is None or timing is None or timing.time_to_first_token is None:
            return
        computed = usage.prompt_tokens - usage.cached_tokens
        if computed > 0 and timing.time_to_first_token > 0:
            self._tokens += computed
            self._seconds += timing.time_to_first_token

    def seconds(self, tokens: int) -> float | None:
        if self._given is not None:
            return tokens / self._given
        return tokens * self._seconds / self._tokens if self._tokens else None


def _conversation(recorded: RecordedTurn, turn: Turn, *more: Mapping[str, Any]) -> Conversation:
    settings = {"model": recorded.line.model, **turn.template_kwargs}
    return Conversation([*turn.messages, *more], [tool_dict(tool) for tool in turn.tools], settings)


def _evicted(recorded: RecordedTurn, left: _Left) -> int:
    """Tokens that the server had to compute again though the prompt is the same, by its own counts; 0 where it does not say."""
    usage = recorded.line.usage
    if usage is None or usage.cached_tokens is None or left.recorded_tokens is None:
        return 0
    expected = min(left.recorded_tokens, usage.prompt_tokens) // BLOCK_SIZE * BLOCK_SIZE
    return max(0, expected - usage.cached_tokens)
