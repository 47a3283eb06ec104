"""A Chat Completions body to a Turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """How the caller wants the answer written, beyond what it says. `message_warnings`: those about single messages."""

    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    message_warnings: tuple[str, ...] = ()


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
    """The Turn of a body. Adds to `warnings` what was ignored. `seen`: what is known of its messages from the turn before.
    Raises TurnError 400 that names the field."""
    fields, messages, digests, message_warnings = _messages(body, seen)
    warnings.extend(unknown_fields(body, ChatRequest))
    warnings.extend(message_warnings)
    tools = parse_tools(fields.tools, warnings)
    choice = parse_tool_choice(fields.tool_choice, fields.parallel_tool_calls, tools, fields.max_tool_calls)
    if fields.top_logprobs is not None and fields.top_logprobs > 0 and not fields.logprobs:
        raise bad_field("top_logprobs", "it needs logprobs to be true")
    by_new_name = fields.max_completion_tokens is not None
    wish = parse_reasoning(
        fields.reasoning_effort,
        fields.thinking,
        fields.reasoning,
        {"thinking_budget": fields.thinking_budget, "thinking_token_budget": fields.thinking_token_budget},
    )
    template_kwargs = _template_kwargs(fields, wish)
    thinking = model.thinking(messages, bool(tools), template_kwargs, wish.budget_for)
    regions = model.tool_format.exempt_regions
    marked = (bool(tools) and choice.mode != "none") or model.tool_format.owns_reasoning
    sampling = sampling_params(
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
    turn = Turn(
        request_id=request_id,
        model=model.name,
        session=session,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        response_format=parse_answer_format(fields),
        sampling=sampling,
        stream=bool(fields.stream),
        priority=fields.priority or 0,
        cache_salt=scoped_salt(session.tenant, fields.cache_salt),
        template_kwargs=template_kwargs,
        thinking=thinking,
        warnings=tuple(warnings),
        message_digests=digests,
    )
    options = ChatOptions(
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        logprobs=bool(fields.logprobs),
        return_token_ids=bool(fields.return_token_ids),
        message_warnings=message_warnings,
    )
    return turn, options


def _messages(
    body: dict[str, Any], seen: Remembered | None
) -> tuple[ChatRequest, tuple[Mapping[str, Any], ...], bytes, tuple[str, ...]]:
    """The fields, the messages, their digests (where they are to be remembered), and what is to be said about them."""
    warnings: list[str] = []
    known = seen.known if seen is not None else None
    if seen is not None and known is not None:
        try:
            fields = fit({**body, "messages": seen.rest}, ChatRequest)
            new = normalise(fields.messages, warnings, start=len(known.messages))
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
