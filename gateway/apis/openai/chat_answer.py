"""Deltas to a chat.completion, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.apis.codec import AnswerIdentity
from gateway.apis.openai.chat_request import ChatOptions
from gateway.apis.openai.errors import error_body
from gateway.apis.openai.logprobs import chat_logprobs
from gateway.apis.openai.usage import usage_body
from gateway.apis.sse import frame
from gateway.choices import ChoiceDelta, ChoiceEnd, ChoiceState, TurnEvent
from gateway.models import ServedModel
from gateway.running import RunningTurn
from gateway.telemetry.telemetry import Operation
from gateway.turn import Turn, TurnError
from gateway.workers.protocol import TokenLogprob
from grammar.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart


@dataclass(slots=True)
class _Withheld:
    """What came with text that is not out yet."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ChatAnswer:
    """An `gateway.apis.codec.Answer` for /v1/chat/completions."""

    dialect = "openai.chat"
    operation: Operation = "chat"

    def __init__(
        self, model: ServedModel, turn: Turn, options: ChatOptions, *, created: int, fingerprint: str, prompt_ids: list[int]
    ) -> None:
        """`created`: Unix seconds. `prompt_ids`: filled once the prompt is known, for return_token_ids."""
        self._tokenizer = model.tokenizer
        self._turn = turn
        self._options = options
        self._prompt_ids = prompt_ids
        self._envelope = {"id": turn.request_id, "created": created, "model": model.name, "system_fingerprint": fingerprint}
        self._withheld: dict[int, _Withheld] = {}
        self._warnings: tuple[str, ...] = ()

    @property
    def identity(self) -> AnswerIdentity:
        return AnswerIdentity(self._envelope, self._prompt_ids)

    def adopt(self, identity: AnswerIdentity) -> None:
        self._envelope = dict(identity.envelope)
        self._prompt_ids = identity.prompt_ids

    def body(self, running: RunningTurn) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._envelope,
            "object": "chat.completion",
            "choices": [self._choice(state) for state in running.choices],
            "usage": usage_body(running),
        }
        if self._options.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids
        warnings = [*running.warnings, *(said for state in running.choices for said in state.violations)]
        if warnings:
            body["warnings"] = warnings
        return body

    def opening(self, running: RunningTurn) -> bytes:
        self._warnings = running.warnings
        opening = {"role": "assistant", "content": ""}
        frames = []
        for state in running.choices:
            extra = {"prompt_token_ids": self._prompt_ids} if self._options.return_token_ids and state.index == 0 else {}
            frames.append(
                self._chunk([{"index": state.index, "delta": opening, "logprobs": None, "finish_reason": None}], **extra)
            )
        return b"".join(frames)

    def event(self, event: TurnEvent) -> bytes:
        withheld = self._withheld.setdefault(event.index, _Withheld())
        if isinstance(event, ChoiceEnd):
            choice = self._delta_choice(event.index, {}, withheld)
            choice["finish_reason"] = event.finish_reason
            choice["stop_reason"] = event.stop_reason
            warnings = [*self._warnings, *event.violations]
            return self._chunk([choice], **({"warnings": warnings} if warnings else {}))
        return self._deltas(event, withheld)

    def closing(self, running: RunningTurn) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._options.include_usage:
            return done
        return (
            frame(
                {
                    **self._envelope,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": usage_body(running),
                }
            )
            + done
        )

    def failure(self, error: TurnError) -> bytes:
        return frame(error_body(error))

    def _deltas(self, event: ChoiceDelta, withheld: _Withheld) -> bytes:
        withheld.logprobs.extend(event.logprobs)
        withheld.token_ids.extend(event.token_ids)
        frames = []
        for delta in event.deltas:
            content = _delta(delta)
            if content is not None:
                frames.append(self._chunk([self._delta_choice(event.index, content, withheld)]))
        return b"".join(frames)

    def _delta_choice(self, index: int, delta: dict[str, Any], withheld: _Withheld) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._options.logprobs and withheld.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, withheld.logprobs)
        if self._options.return_token_ids:
            choice["token_ids"] = list(withheld.token_ids)
        withheld.logprobs.clear()
        withheld.token_ids.clear()
        return choice

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        chunk: dict[str, Any] = {**self._envelope, "object": "chat.completion.chunk", "choices": choices, **extra}
        if self._options.include_usage:
            chunk["usage"] = None
        return frame(chunk)

    def _choice(self, state: ChoiceState) -> dict[str, Any]:
        text = "".join(state.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if state.calls else ""), "refusal": None}
        reasoning = "".join(state.reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if state.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
                for call in state.calls
            ]
        choice: dict[str, Any] = {
            "index": state.index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, state.logprobs) if self._options.logprobs else None,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = list(state.token_ids)
        return choice


def _delta(delta: Delta) -> dict[str, Any] | None:
    """One delta as OpenAI writes it: a call's id and name in its first delta only, its end not at all."""
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return None
