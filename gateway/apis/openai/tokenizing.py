"""/tokenize and /detokenize, in the shape vLLM gave them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.apis.bodies import fit, unknown_fields
from gateway.apis.openai.messages import Message, normalise
from gateway.apis.openai.sampling import bad_field
from gateway.apis.openai.tools import parse_tools
from gateway.models import ServedModel
from gateway.pipeline import Pipeline
from gateway.rendering import RESERVED_VARIABLES
from gateway.turn import SessionRef, Turn


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either a plain `prompt`, encoded with special tokens unless told otherwise, or `messages`, rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to text."""

    tokens: list[int]
    model: str | None = None


async def tokenize(body: dict[str, Any], pipeline: Pipeline, warnings: list[str]) -> dict[str, Any]:
    """`{count, max_model_len, tokens, token_strs}`. Raises TurnError."""
    fields = fit(body, TokenizeRequest)
    warnings.extend(unknown_fields(body, TokenizeRequest))
    model = pipeline.models.find(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_field("prompt", "exactly one of prompt and messages is needed")
    info = pipeline.pool_info(model)
    if fields.prompt is not None:
        ids = await pipeline.prompts.tokenise_text(
            model, fields.prompt, add_special_tokens=fields.add_special_tokens is not False
        )
    else:
        ids = await _messages(fields, pipeline, model, warnings)
    strings = [model.tokenizer.token_text(token_id) for token_id in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}


async def _messages(fields: TokenizeRequest, pipeline: Pipeline, model: ServedModel, warnings: list[str]) -> list[int]:
    if fields.add_special_tokens:
        raise bad_field("add_special_tokens", "chat templates write special tokens themselves; leave it out with messages")
    kwargs = fields.chat_template_kwargs or {}
    for name in kwargs:
        if name in RESERVED_VARIABLES:
            raise bad_field(f"chat_template_kwargs.{name}", "the request's own fields say this; leave it out here")
    turn = Turn(
        request_id="tokenize",
        model=model.name,
        session=SessionRef("", None),
        messages=normalise(fields.messages or [], warnings),
        tools=parse_tools(fields.tools, warnings),
        template_kwargs=kwargs,
    )
    return await pipeline.prompts.tokenise_turn(model, turn, add_generation_prompt=fields.add_generation_prompt is not False)


def detokenize(body: dict[str, Any], pipeline: Pipeline, warnings: list[str]) -> dict[str, Any]:
    """`{prompt}`. Raises TurnError."""
    fields = fit(body, DetokenizeRequest)
    warnings.extend(unknown_fields(body, DetokenizeRequest))
    model = pipeline.models.find(fields.model)
    try:
        return {"prompt": model.tokenizer.decode(fields.tokens)}
    except ValueError as error:
        raise bad_field("tokens", str(error)) from error
