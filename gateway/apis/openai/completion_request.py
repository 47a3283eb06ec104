"""A Completions body: prompts as text or token ids, and how to go on from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from gateway.apis.bodies import fit, unknown_fields
from gateway.apis.openai.answer_format import parse_answer_format
from gateway.apis.openai.sampling import INT32_MAX, SamplingFields, bad_field, sampling_params
from gateway.models import ServedModel
from gateway.turn import SessionRef, Turn
from sessions.identity import scoped_salt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this API."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of Completions beside those it shares with Chat Completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)] | None = None


TextOrIds = str | list[int]


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The prompts, and how the caller wants the answer written."""

    prompts: tuple[TextOrIds, ...]
    echo: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def parse_completion(
    body: dict[str, Any],
    *,
    model: ServedModel,
    session: SessionRef,
    request_id: str,
    max_choices: int,
    max_prompts: int,
    warnings: list[str],
) -> tuple[Turn, CompletionOptions]:
    """A Turn without messages, and its prompts. Adds to `warnings`. Raises TurnError 400 that names the field."""
    fields = fit(body, CompletionRequest)
    warnings.extend(unknown_fields(body, CompletionRequest))
    prompts = _prompts(fields.prompt, max_prompts)
    if fields.suffix:
        raise bad_field("suffix", "the model cannot fill in a middle; leave it out")
    n = fields.n if fields.n is not None else 1
    if fields.best_of is not None and fields.best_of != n:
        raise bad_field("best_of", "choices are not ranked here; leave it out, or ask for as many with n")
    if fields.echo and fields.logprobs is not None:
        raise bad_field("echo", "log-probabilities of prompt tokens are not computed; leave out echo or logprobs")
    if n * len(prompts) > max_choices:
        raise bad_field("n", f"{len(prompts)} prompts with {n} choices each are more than {max_choices} choices")
    sampling = sampling_params(
        fields,
        max_tokens=fields.max_tokens if fields.max_tokens is not None else max(DEFAULT_MAX_TOKENS, fields.min_tokens or 0),
        max_tokens_field="max_tokens",
        logprobs=fields.logprobs,
        max_choices=max_choices,
        vocab_size=model.tokenizer.size,
        defaults=model.tokenizer.files.sampling_defaults,
    )
    turn = Turn(
        request_id=request_id,
        model=model.name,
        session=session,
        messages=(),
        response_format=parse_answer_format(fields),
        sampling=sampling,
        stream=bool(fields.stream),
        priority=fields.priority or 0,
        cache_salt=scoped_salt(session.tenant, fields.cache_salt),
        warnings=tuple(warnings),
    )
    return turn, CompletionOptions(
        prompts=prompts,
        echo=bool(fields.echo),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        logprobs=fields.logprobs is not None,
        return_token_ids=bool(fields.return_token_ids),
    )


def _prompts(prompt: str | list[Any], most: int) -> tuple[TextOrIds, ...]:
    """A text, several texts, token ids, or several lists of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad_field("prompt", "at least one prompt is needed")
    if _is_id(prompt[0]):
        return (_ids(prompt, "prompt"),)
    if len(prompt) > most:
        raise bad_field("prompt", f"at most {most} prompts are taken in one request, not {len(prompt)}")
    prompts: list[TextOrIds] = []
    for position, item in enumerate(prompt):
        where = f"prompt[{position}]"
        if isinstance(item, str) and isinstance(prompt[0], str):
            prompts.append(item)
        elif isinstance(item, list) and isinstance(prompt[0], list):
            prompts.append(_ids(item, where))
        else:
            raise bad_field(where, "prompts must all be strings, or all lists of token ids, or one list of token ids")
    return tuple(prompts)


def _ids(values: list[Any], where: str) -> list[int]:
    for position, value in enumerate(values):
        if not _is_id(value):
            raise bad_field(f"{where}[{position}]", "a token id (a whole number, zero or more) is expected")
    return values


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
