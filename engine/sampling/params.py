"""Which sampling parameters are accepted. Everything a client can get wrong is refused here, before a request is queued.

Bounds keep one request from costing what hundreds do; they lie far outside of what models are used with.
"""

from __future__ import annotations

import math
from typing import NoReturn

from engine.core import RequestRefused
from gateway.workers.protocol import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 256
MAX_EXEMPT_REGIONS = 16
MAX_EXEMPT_CHARACTERS = 256
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1


def _refuse(field: str, message: str) -> NoReturn:
    raise RequestRefused("invalid_sampling", message, f"sampling.{field}")


def _number(field: str, value: float, low: float, high: float, remedy: str) -> None:
    """Refuses what is not a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(field, f"{field} must be a number, not {type(value).__name__}; {remedy}.")
    if not math.isfinite(value) or not low <= value <= high:
        _refuse(field, f"{field} is {value!r}; it must lie between {low:g} and {high:g}; {remedy}.")


def _integer(field: str, value: int, low: int, high: int, remedy: str) -> None:
    """Refuses what is not an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field, f"{field} must be an integer, not {type(value).__name__}; {remedy}.")
    if not low <= value <= high:
        _refuse(field, f"{field} is {value}; it must lie between {low} and {high}; {remedy}.")


def _validate_length(params: SamplingParams, max_model_len: int) -> None:
    if params.max_tokens is not None:
        remedy = "leave it out to generate as many tokens as the context holds"
        _integer("max_tokens", params.max_tokens, 1, max_model_len, remedy)
    _integer("min_tokens", params.min_tokens, 0, max_model_len, "0 turns it off")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        message = f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}; lower min_tokens."
        _refuse("min_tokens", message)


def _validate_distribution(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0.0, MAX_TEMPERATURE, "0 is greedy, 1 is the model's own distribution")
    _integer("top_k", params.top_k, 0, 2**31 - 1, "0 turns it off")
    _number("top_p", params.top_p, 0.0, 1.0, "1 turns it off")
    if params.top_p <= 0.0:
        _refuse("top_p", "top_p is 0; it must be greater than 0 and at most 1; use temperature 0 for greedy sampling.")
    _number("min_p", params.min_p, 0.0, 1.0, "0 turns it off")
    _number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY, "0 turns it off")
    _number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY, "0 turns it off")
    low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    _number("repetition_penalty", params.repetition_penalty, low, high, "1 turns it off")
    if params.seed is not None:
        _integer("seed", params.seed, MIN_SEED, MAX_SEED, "a seed is a 64-bit integer")


def _validate_token_ids(field: str, token_ids: tuple[int, ...] | dict[int, float], vocab_size: int, limit: int) -> None:
    if len(token_ids) > limit:
        _refuse(field, f"{field} has {len(token_ids)} entries; at most {limit} are allowed; send fewer.")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            message = f"{field} names token {token_id!r}; the model's token ids are 0 to {vocab_size - 1}; remove it."
            _refuse(field, message)


def _validate_stops(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"stop has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are allowed; send fewer.")
    for index, stop in enumerate(params.stop):
        if not stop:
            _refuse(f"stop[{index}]", f"stop[{index}] is empty and would match at once; remove it.")
    characters = sum(map(len, params.stop))
    if characters > MAX_STOP_CHARACTERS:
        message = f"The stop strings have {characters} characters together; at most {MAX_STOP_CHARACTERS} are allowed."
        _refuse("stop", message + " Shorten them.")
    if len(params.stop_exempt) > MAX_EXEMPT_REGIONS:
        message = f"stop_exempt has {len(params.stop_exempt)} regions; at most {MAX_EXEMPT_REGIONS} are allowed; send fewer."
        _refuse("stop_exempt", message)
    if len(params.stop_after) > MAX_EXEMPT_CHARACTERS:
        count, most = len(params.stop_after), MAX_EXEMPT_CHARACTERS
        _refuse("stop_after", f"stop_after has {count} characters; at most {most} are allowed; shorten it.")
    if len(params.visible_tokens) > MAX_EXEMPT_REGIONS:
        count, most = len(params.visible_tokens), MAX_EXEMPT_REGIONS
        _refuse("visible_tokens", f"visible_tokens has {count} tokens; at most {most} are allowed; send fewer.")
    for index, (begin, end) in enumerate(params.stop_exempt):
        for text in (begin, end):
            if not 1 <= len(text) <= MAX_EXEMPT_CHARACTERS:
                message = (
                    f"stop_exempt[{index}] has a text of {len(text)} characters; it must have 1 to {MAX_EXEMPT_CHARACTERS}."
                )
                _refuse(f"stop_exempt[{index}]", message)


def validate(params: SamplingParams, *, vocab_size: int, max_model_len: int) -> None:
    """Refuses parameters outside of the bounds above or of the model.

    vocab_size: how many logits the model gives. max_model_len: tokens of prompt and generation together.
    Raises RequestRefused with code `invalid_sampling`, the field as `sampling.<name>`, and a sentence with the remedy.
    """
    _integer("n", params.n, 1, MAX_CHOICES, "1 asks for one choice")
    _validate_length(params, max_model_len)
    _validate_distribution(params)
    if params.logprobs is not None:
        _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS, "leave it out for none")
    _validate_token_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    _validate_token_ids("logit_bias", params.logit_bias, vocab_size, MAX_LOGIT_BIAS_ENTRIES)
    for token_id, bias in params.logit_bias.items():
        _number(f"logit_bias.{token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "0 leaves the token as it is")
    _validate_stops(params)
