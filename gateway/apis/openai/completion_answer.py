"""Text to a text_completion, whole or in chunks. Choices are numbered prompt by prompt."""

from __future__ import annotations

from typing import Any

from gateway.apis.codec import AnswerIdentity
from gateway.apis.openai.completion_request import CompletionOptions
from gateway.apis.openai.errors import error_body
from gateway.apis.openai.logprobs import completion_logprobs
from gateway.apis.openai.usage import usage_body
from gateway.apis.sse import frame
from gateway.choices import ChoiceEnd, TurnEvent
from gateway.models import ServedModel
from gateway.running import RunningTurn
from gateway.telemetry.telemetry import Operation
from gateway.turn import Turn, TurnError
from gateway.workers.protocol import TokenLogprob
from grammar.deltas import TextDelta


class CompletionAnswer:
    """An `gateway.apis.codec.Answer` for /v1/completions."""

    dialect = "openai.completions"
    operation: Operation = "text_completion"

    def __init__(
        self,
        model: ServedModel,
        turn: Turn,
        options: CompletionOptions,
        *,
        created: int,
        fingerprint: str,
        prompt_ids: list[list[int]],
    ) -> None:
        """`created`: Unix seconds. `prompt_ids`: filled once the prompts are known."""
        self._tokenizer = model.tokenizer
        self._turn = turn
        self._options = options
        self._prompt_ids = prompt_ids
        self._envelope = {
            "id": turn.request_id,
            "object": "text_completion",
            "created": created,
            "model": model.name,
            "system_fingerprint": fingerprint,
        }
        self._offsets: dict[int, int] = {}

    @property
    def identity(self) -> AnswerIdentity:
        return AnswerIdentity(self._envelope, self._prompt_ids)

    def adopt(self, identity: AnswerIdentity) -> None:
        self._envelope = dict(identity.envelope)
        self._prompt_ids = identity.prompt_ids

    def body(self, running: RunningTurn) -> dict[str, Any]:
        choices = []
        for state in running.choices:
            logprobs = completion_logprobs(self._tokenizer, state.logprobs, 0)[0] if self._options.logprobs else None
            text = self._echo(state.index) + "".join(state.text)
            choice: dict[str, Any] = {
                "index": state.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            if self._options.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_ids[self._prompt_of(state.index)]
                choice["token_ids"] = list(state.token_ids)
            choices.append(choice)
        return {**self._envelope, "choices": choices, "usage": usage_body(running)}

    def opening(self, running: RunningTurn) -> bytes:
        if not self._options.echo and not self._options.return_token_ids:
            return b""
        frames = []
        for state in running.choices:
            choice = self._choice(state.index, self._echo(state.index))
            if self._options.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_ids[self._prompt_of(state.index)]
                choice["token_ids"] = []
            frames.append(self._chunk([choice]))
        return b"".join(frames)

    def event(self, event: TurnEvent) -> bytes:
        if isinstance(event, ChoiceEnd):
            choice = self._choice(event.index, "")
            choice["finish_reason"] = event.finish_reason
            choice["stop_reason"] = event.stop_reason
            return self._chunk([choice])
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, TextDelta))
        ids = event.token_ids if self._options.return_token_ids else ()
        if not text and not ids and not event.logprobs:
            return b""
        choice = self._choice(event.index, text, event.logprobs)
        if self._options.return_token_ids:
            choice["token_ids"] = list(ids)
        return self._chunk([choice])

    def closing(self, running: RunningTurn) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._options.include_usage:
            return done
        return frame({**self._envelope, "choices": [], "usage": usage_body(running)}) + done

    def failure(self, error: TurnError) -> bytes:
        return frame(error_body(error))

    def _choice(self, index: int, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> dict[str, Any]:
        shaped = None
        if self._options.logprobs and logprobs:
            shaped, self._offsets[index] = completion_logprobs(self._tokenizer, logprobs, self._offsets.get(index, 0))
        return {"index": index, "text": text, "logprobs": shaped, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk: dict[str, Any] = {**self._envelope, "choices": choices}
        if self._options.include_usage:
            chunk["usage"] = None
        return frame(chunk)

    def _prompt_of(self, index: int) -> int:
        return index // self._turn.sampling.n

    def _echo(self, index: int) -> str:
        if not self._options.echo:
            return ""
        prompt = self._options.prompts[self._prompt_of(index)]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
