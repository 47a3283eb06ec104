"""One choice of a turn: its tokens to text, the text to deltas, the deltas to what it became in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.workers.protocol import Finished, TokenLogprob, Tokens
from grammar.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.parser import StreamParser, TextParser
from grammar.stop import TextStream

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What became certain of one choice. `token_ids` are the tokens that arrived; `logprobs` those whose text is out."""

    index: int
    deltas: tuple[Delta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is complete. `stop_reason`: the stop string or stop token id that ended it, if one did."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    violations: tuple[str, ...] = ()


TurnEvent = ChoiceDelta | ChoiceEnd


@dataclass(slots=True)
class CallState:
    """A tool call as far as it has come. `arguments` is JSON text; `complete` is False when it was cut."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class ChoiceState:
    """Everything a choice has said so far."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallState] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    reasoning_tokens: int = 0
    """Of `token_ids`, those that came while the answer was reasoning, tags included."""
    violations: list[str] = field(default_factory=list)
    """What of their schemas calls or the answer violate, where the grammar did not hold it."""
    ended_by_token: bool = False
    """The last of `token_ids` is the token that ended it, and has no text."""
    plain: bool = False
    """Its ids are text wherever they end: nobody looks for calls or reasoning in them."""

    def add(self, deltas: Iterable[Delta]) -> None:
        """Takes deltas in, in order."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self.text.append(text)
                case ReasoningDelta(text):
                    self.reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    self.calls.append(CallState(call_id, name))
                case ToolCallArguments(index, text):
                    self.calls[index].arguments.append(text)
                case ToolCallEnd(index, complete):
                    self.calls[index].complete = complete


class ChoiceDecoder:
    """Tokens of one choice in, events out. Stop strings and the text after them never leave it."""

    def __init__(
        self,
        index: int,
        text_stream: TextStream,
        parser: StreamParser,
        *,
        withheld_ids: frozenset[int] = frozenset(),
        named_tool: bool = False,
    ) -> None:
        """`withheld_ids`: tokens that may end the choice; one that does has no text. `named_tool`: the caller named the tool,
        so a call is what `stop` means (OpenAI's rule)."""
        self.state = ChoiceState(index, plain=type(parser) is TextParser)
        self._text_stream = text_stream
        self._parser = parser
        self._withheld_ids = withheld_ids
        self._named_tool = named_tool
        self._reasons = hasattr(parser, "reasoning")  # tokens are then fed one by one, to count those of the reasoning
        self._held: tuple[int, TokenLogprob | None] | None = None
        self._has_arguments = False
        self._released = 0  # characters that passed the stop strings
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # (end of the token's text, its logprob), in order

    def feed(self, chunk: Tokens) -> ChoiceDelta:
        """More tokens."""
        self.state.token_ids.extend(chunk.token_ids)
        deltas: list[Delta] = []
        if chunk.logprobs:
            for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                self._token(token_id, logprob, deltas)
        elif self._held is None and not self._reasons and self._withheld_ids.isdisjoint(chunk.token_ids):
            self._feed(chunk.token_ids, deltas)
        else:
            for token_id in chunk.token_ids:
                self._token(token_id, None, deltas)
        return self._event(deltas, chunk.token_ids)

    def finish(self, finished: Finished) -> tuple[ChoiceDelta, ChoiceEnd]:
        """The worker says it is over: what was held back comes out."""
        deltas: list[Delta] = []
        ended_by_token = finished.finish_reason == "stop" and not isinstance(finished.stop_reason, str)
        if ended_by_token:
            self.state.ended_by_token = self._held is not None
            self._held = None
        self._release_held(deltas)
        self._pass(self._text_stream.finish(), deltas)
        deltas.extend(self._closed(self._parser.finish()))
        event = self._event(deltas, (), last=True)
        calls = any(self.state.calls)
        reason: FinishReason
        if finished.finish_reason == "length":
            reason = "length"
        elif calls and not self._named_tool:
            reason = "tool_calls"
        else:
            reason = "stop"
        self.state.finish_reason = reason
        self.state.stop_reason = finished.stop_reason
        return event, ChoiceEnd(self.state.index, reason, finished.stop_reason)

    def _count(self) -> None:
        if self._reasons and getattr(self._parser, "reasoning", False):
            self.state.reasoning_tokens += 1

    def _token(self, token_id: int, logprob: TokenLogprob | None, deltas: list[Delta]) -> None:
        self._release_held(deltas)
        if token_id in self._withheld_ids:
            self._held = (token_id, logprob)
            return
        self._count()
        self._emit(token_id, logprob, deltas)

    def _release_held(self, deltas: list[Delta]) -> None:
        """The token was not the end after all (min_tokens, ignore_eos), so it is text like any other."""
        if self._held is not None:
            token_id, logprob = self._held
            self._held = None
            self._emit(token_id, logprob, deltas)

    def _emit(self, token_id: int, logprob: TokenLogprob | None, deltas: list[Delta]) -> None:
        self._feed((token_id,), deltas)
        if logprob is not None and self._text_stream.matched is None:
            self._waiting.append((self._released + self._text_stream.held, logprob))

    def _feed(self, token_ids: tuple[int, ...], deltas: list[Delta]) -> None:
        text, _ = self._text_stream.feed(token_ids)
        self._pass(text, deltas)

    def _pass(self, text: str, deltas: list[Delta]) -> None:
        if text:
            self._released += len(text)
            deltas.extend(self._closed(self._parser.feed(text)))

    def _closed(self, deltas: Sequence[Delta]) -> Iterable[Delta]:
        """A call without parameters has the arguments {}, never the empty string."""
        for delta in deltas:
            if isinstance(delta, ToolCallEnd) and delta.complete and not self._has_arguments:
                yield ToolCallArguments(delta.index, "{}")
            if isinstance(delta, ToolCallStart):
                self._has_arguments = False
            elif isinstance(delta, ToolCallArguments) and delta.text:
                self._has_arguments = True
            yield delta

    def _event(self, deltas: list[Delta], token_ids: tuple[int, ...], *, last: bool = False) -> ChoiceDelta:
        logprobs = []
        while self._waiting and self._waiting[0][0] <= self._released:
            logprobs.append(self._waiting.popleft()[1])
        if last or self._text_stream.matched is not None:
            self._waiting.clear()  # tokens of the stop string and of what came after it
        self.state.add(deltas)
        self.state.logprobs.extend(logprobs)
        return ChoiceDelta(self.state.index, tuple(deltas), token_ids, tuple(logprobs))
