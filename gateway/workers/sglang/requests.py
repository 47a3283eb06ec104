"""A request of the worker protocol as a body for SGLang's /generate."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.workers.protocol import GenerateRequest


def generate_body(request: GenerateRequest, ids: list[int], max_tokens: int, adapter: str | None) -> bytes:
    """JSON. `adapter`: a LoRA adapter by its name there. What SGLang has no word for is left out: regions in which stop strings
    do not fire, and priorities, which it refuses unless it was started for them."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min(sampling.min_tokens, max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "n": sampling.n,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if request.grammar is not None:
        params["structural_tag"] = request.grammar
    body: dict[str, Any] = {"rid": request.request_id, "input_ids": ids, "sampling_params": params, "stream": True}
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}
    if request.cache_salt:
        body["extra_key"] = request.cache_salt
    if adapter is not None:
        body["lora_path"] = adapter
    return msgspec.json.encode(body)
