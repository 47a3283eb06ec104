"""A Chat Completions body to a Turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from gateway.apis.bodies import fit, unknown_fields
from gateway.apis.body_memo import Remembered
from gateway.apis.openai.answer_format import parse_answer_format
from gateway.apis.openai.messages import Message, normalise
from gateway.apis.openai.reasoning import ReasoningWish, parse_reasoning
from gateway.apis.openai.sampling import INT32_MAX, SamplingFields, bad_field, sampling_params
from gateway.apis.openai.tools import parse_tool_choice, parse_tools
from gateway.models import ServedModel
from gateway.rendering import RESERVED_VARIABLES
from gateway.thinking import exempt_while, shown_while
from gateway.turn import SessionRef, Turn, TurnError
from gateway.workers.protocol import SamplingParams
from grammar.thinking import Thinking
from grammar.tools import ResponseFormat, Tool, ToolChoice
from sessions.digests import message_digests
from sessions.identity import scoped_salt

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)]


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of Chat Completions beside those it shares with Completions."""

    messages: list[Message]
    max_tokens: _AtLeastOne | None = None
    max_completion_tokens: _AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: _AtLeastOne | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    thinking: Any = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    # Taken and without effect here.
    store: Any = None
    verbosity: Any = None
    prediction: Any = None
    modalities: Any = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the caller wants the answer written, beyond what it says."""

    include_usage: bool
    logprobs: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Everything that a body says beside its messages. An agent's turns differ in nothing but those, so that this is made
    once: its tools alone may be fifty schemas. `sampling` holds for answers with this `thinking`."""

    model: ServedModel
    fields: ChatRequest
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    response_format: ResponseFormat
    template_kwargs: Mapping[str, Any]
    wish: ReasoningWish
    thinking: Thinking | None
    sampling: SamplingParams
    options: ChatOptions
    unknown: tuple[str, ...]
    warnings: tuple[str, ...]


def parse_chat(
    body: dict[str, Any],
    *,
    model: ServedModel,
    session: SessionRef,
    request_id: str,
    max_choices: int,
    warnings: list[str],
    seen: Remembered | None = None,
) -> tuple[Turn, ChatOptions]:
    """The Turn of a body. Adds to `warnings` what was ignored. `seen`: what is known of it from the turn before; in it is left
    what the turn after can use. Raises TurnError 400 that names the field."""
    frame = seen.frame if seen is not None else None
    fields = frame.fields if isinstance(frame, ChatFrame) and frame.model is model else None
    fields, messages, digests, said = _messages(body, fields, seen)
    if not isinstance(frame, ChatFrame) or fields is not frame.fields:
        frame = _frame(body, fields, messages, model, max_choices)
    thinking = frame.thinking
    if model.thinking_reader is not None:
        thinking = model.thinking(messages, bool(frame.tools), frame.template_kwargs, frame.wish.budget_for)
        if thinking != frame.thinking:
            sampling = _sampling(fields, frame.tools, frame.tool_choice, thinking, model, max_choices)
            frame = replace(frame, thinking=thinking, sampling=sampling)
    warnings.extend((*frame.unknown, *said, *frame.warnings))
    turn = Turn(
        request_id=request_id,
        model=model.name,
        session=session,
        messages=messages,
        tools=frame.tools,
        tool_choice=frame.tool_choice,
        response_format=frame.response_format,
        sampling=frame.sampling,
        stream=bool(fields.stream),
        priority=fields.priority or 0,
        cache_salt=scoped_salt(session.tenant, fields.cache_salt),
        template_kwargs=frame.template_kwargs,
        thinking=thinking,
        warnings=tuple(warnings),
        message_digests=digests,
    )
    if seen is not None:
        seen.frame, seen.warnings = frame, said
    return turn, frame.options


def _frame(
    body: dict[str, Any], fields: ChatRequest, messages: Sequence[Mapping[str, Any]], model: ServedModel, max_choices: int
) -> ChatFrame:
    unknown = tuple(unknown_fields(body, ChatRequest))
    warnings: list[str] = []
    tools = parse_tools(fields.tools, warnings)
    choice = parse_tool_choice(fields.tool_choice, fields.parallel_tool_calls, tools, fields.max_tool_calls)
    if fields.top_logprobs is not None and fields.top_logprobs > 0 and not fields.logprobs:
        raise bad_field("top_logprobs", "it needs logprobs to be true")
    wish = parse_reasoning(
        fields.reasoning_effort,
        fields.thinking,
        fields.reasoning,
        {"thinking_budget": fields.thinking_budget, "thinking_token_budget": fields.thinking_token_budget},
    )
    template_kwargs = _template_kwargs(fields, wish)
    thinking = model.thinking(messages, bool(tools), template_kwargs, wish.budget_for)
    sampling = _sampling(fields, tools, choice, thinking, model, max_choices)
    options = ChatOptions(
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        logprobs=bool(fields.logprobs),
        return_token_ids=bool(fields.return_token_ids),
    )
    return ChatFrame(
        model=model,
        fields=msgspec.structs.replace(fields, messages=[]),
        tools=tools,
        tool_choice=choice,
        response_format=parse_answer_format(fields),
        template_kwargs=template_kwargs,
        wish=wish,
        thinking=thinking,
        sampling=sampling,
        options=options,
        unknown=unknown,
        warnings=tuple(warnings),
    )


def _sampling(
    fields: ChatRequest,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    thinking: Thinking | None,
    model: ServedModel,
    max_choices: int,
) -> SamplingParams:
    by_new_name = fields.max_completion_tokens is not None
    regions = model.tool_format.exempt_regions
    marked = (bool(tools) and choice.mode != "none") or model.tool_format.owns_reasoning
    return sampling_params(
        fields,
        max_tokens=fields.max_completion_tokens if by_new_name else fields.max_tokens,
        max_tokens_field="max_completion_tokens" if by_new_name else "max_tokens",
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        max_choices=max_choices,
        vocab_size=model.tokenizer.size,
        defaults=model.tokenizer.files.sampling_defaults,
        stop_exempt=(*(regions if marked else ()), *exempt_while(thinking)),
        stop_after=thinking.tags.end if thinking is not None and thinking.tags and thinking.state == "open" else "",
        visible_tokens=(*(model.tool_format.visible_tokens if marked else ()), *shown_while(thinking)),
    )


def _messages(
    body: dict[str, Any], fields: ChatRequest | None, seen: Remembered | None
) -> tuple[ChatRequest, tuple[Mapping[str, Any], ...], bytes, tuple[str, ...]]:
    """The fields, the messages, their digests (where they are to be remembered), and what is to be said about them. `fields`:
    where only the messages can be new."""
    warnings: list[str] = []
    known = seen.known if seen is not None else None
    if seen is not None and known is not None:
        try:
            if fields is None:
                fields = fit({**body, "messages": seen.rest}, ChatRequest)
                given = fields.messages
            else:
                given = fit(seen.rest, list[Message], at="messages")
            new = normalise(given, warnings, start=len(known.messages))
        except TurnError:
            # Said below of the whole, with the right numbers.
            warnings.clear()
        else:
            return fields, known.messages + new, known.digests + message_digests(new), (*known.warnings, *warnings)
    fields = fit(body, ChatRequest)
    messages = normalise(fields.messages, warnings)
    return fields, messages, message_digests(messages) if seen is not None else b"", tuple(warnings)


def _template_kwargs(fields: ChatRequest, wish: ReasoningWish) -> Mapping[str, Any]:
    given = fields.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED_VARIABLES:
            raise bad_field(f"chat_template_kwargs.{name}", "the request's own fields say this; leave it out here")
    if wish.off:
        return {"enable_thinking": False, "thinking": False, **given}  # as Qwen, GLM and DeepSeek call it
    if wish.effort is not None:
        return {"reasoning_effort": wish.effort, **given}
    return given
