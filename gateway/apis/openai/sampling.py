"""The sampling fields that Chat Completions and Completions share, with OpenAI's ranges and the common extensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from gateway.turn import TurnError
from gateway.workers.protocol import SamplingParams

INT32_MAX = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk without choices carries the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both bodies. Those that only identify, bill or hint are taken as they come and have no effect on tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _AtLeastOne | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    # Extensions that vLLM and SGLang made common.
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: _Count | None = None
    stop_token_ids: list[_Count] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    return_token_ids: bool | None = None
    # What the answer must look like (answer_format.py), as OpenAI, vLLM and SGLang call it.
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    # Taken and without effect here; sessions.identity reads some of them.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    session_id: Any = None
    parent_session_id: Any = None
    vllm_xargs: Any = None
    agent_hint: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    max_choices: int,
    vocab_size: int,
    defaults: Mapping[str, float],
    stop_exempt: tuple[tuple[str, str], ...] = (),
    stop_after: str = "",
    visible_tokens: tuple[str, ...] = (),
) -> SamplingParams:
    """What a worker is told. `defaults`: what the model's authors recommend, for fields the caller leaves open.

    Raises TurnError 400 for what no single field's type can rule out.
    """
    n = fields.n if fields.n is not None else 1
    if n > max_choices:
        raise bad_field("n", f"at most {max_choices} choices can be asked for, not {n}")
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"{min_tokens} is more than {max_tokens_field} ({max_tokens})")

    def chosen(value: float | None, name: str, otherwise: float) -> float:
        return float(value if value is not None else defaults.get(name, otherwise))

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=chosen(fields.temperature, "temperature", 1.0),
        top_k=max(0, int(chosen(fields.top_k, "top_k", 0))),
        top_p=chosen(fields.top_p, "top_p", 1.0),
        min_p=chosen(fields.min_p, "min_p", 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=chosen(fields.repetition_penalty, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        seed=fields.seed,
        n=n,
        logprobs=logprobs,
        stop=_stop_strings(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, vocab_size),
        stop_exempt=stop_exempt,
        stop_after=stop_after,
        visible_tokens=visible_tokens,
        ignore_eos=bool(fields.ignore_eos),
    )


def bad_field(field: str, problem: str) -> TurnError:
    """A 400 for one field: `field: problem.`"""
    return TurnError(400, "invalid_request", f"{field}: {problem}.", param=field)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"at most {MAX_STOP_STRINGS} stop strings are taken, not {len(strings)}")
    for position, text in enumerate(strings):
        where = "stop" if isinstance(stop, str) else f"stop[{position}]"
        if not text:
            raise bad_field(where, "a stop string must not be empty; leave the field out for none")
        if len(text) > MAX_STOP_LENGTH:
            raise bad_field(where, f"a stop string may have {MAX_STOP_LENGTH} characters, not {len(text)}")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if not ids:
        return ()
    if len(ids) > MAX_STOP_STRINGS:
        raise bad_field("stop_token_ids", f"at most {MAX_STOP_STRINGS} ids are taken, not {len(ids)}")
    for position, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise bad_field(f"stop_token_ids[{position}]", f"{token_id} is not in the vocabulary of {vocab_size} tokens")
    return tuple(dict.fromkeys(ids))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_LOGIT_BIASES:
        raise bad_field("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens can be biased, not {len(bias)}")
    result: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal() also takes digits of other scripts, and int() any number of them.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad_field("logit_bias", f"the key {key[:40]!r} is not a token id")
        token_id = int(key)
        if token_id >= vocab_size:
            raise bad_field("logit_bias", f"token id {token_id} is not in the vocabulary of {vocab_size} tokens")
        result[token_id] = value
    return result
