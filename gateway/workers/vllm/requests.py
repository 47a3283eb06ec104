"""A request of the worker protocol as a body for vLLM's /v1/completions: prompt as token ids, token ids asked for."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from gateway.workers.protocol import GenerateRequest

_MAX_SALT = 128
_UNFIT_SALT = frozenset("@/\\\0")
# Every name under which vLLM knows a value: what is left out is filled in from the model's generation_config.json there.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def fit_salt(salt: str) -> str:
    """A salt as vLLM takes it: 128 characters at most, none of @, /, backslash and NUL. Others are replaced by their digest;
    blocks under those are not found by the index, as events name them by the digest."""
    if len(salt) <= _MAX_SALT and not _UNFIT_SALT.intersection(salt):
        return salt
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()


def completion_body(request: GenerateRequest, ids: list[int], model: str, max_tokens: int, choices: int) -> bytes:
    """JSON. `max_tokens` is what the request asks for, or what its context has left; `choices` how many answers.

    Stop strings go along as they are: vLLM has no regions in which they do not fire. Priorities do not: vLLM refuses them
    unless it was started for them.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": ids,
        "request_id": request.request_id,
        "max_tokens": max_tokens,
        "n": choices,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
        **{name: getattr(sampling, name) for name in _SAMPLING},
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = sampling.stop
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
        body["return_tokens_as_token_ids"] = True
    if request.grammar is not None:
        body["structured_outputs"] = {"structural_tag": request.grammar}
    if request.cache_salt:
        body["cache_salt"] = fit_salt(request.cache_salt)
    if request.session is not None:
        body["session_id"] = request.session
    return msgspec.json.encode(body)
