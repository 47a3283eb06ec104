"""Every parameter outside of its bounds is refused with a sentence that names it."""

import math

import pytest

from engine.core import RequestRefused
from engine.sampling.params import validate
from gateway.workers.protocol import SamplingParams

VOCAB, CONTEXT = 100, 64


def refusal(**fields):
    with pytest.raises(RequestRefused) as caught:
        validate(SamplingParams(**fields), vocab_size=VOCAB, max_model_len=CONTEXT)
    assert caught.value.code == "invalid_sampling"
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "seed": -(2**63), "n": 1, "max_tokens": 1, "logprobs": 0},
        {"temperature": 100, "seed": 2**64 - 1, "n": 128, "max_tokens": CONTEXT, "min_tokens": CONTEXT, "logprobs": 20},
        {"top_p": 1e-9, "min_p": 1.0, "top_k": 2**31 - 1, "repetition_penalty": 0.01, "presence_penalty": -2.0},
        {"frequency_penalty": 2, "logit_bias": {0: -100.0, 99: 100.0}, "stop_token_ids": (0, 99), "min_tokens": 5},
        {"stop": ("x",) * 64, "stop_exempt": (("a", "b"),) * 16},
    ],
)
def test_bounds_are_inclusive(fields):
    validate(SamplingParams(**fields), vocab_size=VOCAB, max_model_len=CONTEXT)


NUMBERS = {
    "temperature": (-0.1, 100.1),
    "top_p": (-0.5, 0.0, 1.01),
    "min_p": (-0.01, 1.01),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0.0, -1.0, 100.5),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in NUMBERS.items() for value in values])
def test_numbers_outside_of_their_bounds(field, value):
    error = refusal(**{field: value})
    assert error.field == f"sampling.{field}"
    assert error.message.startswith(f"{field} is {value:g}")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(field, value):
    assert refusal(**{field: value}).field == f"sampling.{field}"


@pytest.mark.parametrize("field", [*NUMBERS, "top_k", "n", "seed", "max_tokens", "min_tokens", "logprobs"])
@pytest.mark.parametrize("value", ["1", True, [1]])
def test_values_of_other_types(field, value):
    error = refusal(**{field: value})
    assert error.field == f"sampling.{field}"
    assert f"not {type(value).__name__}" in error.message


INTEGERS = {
    "n": (0, -1, 129),
    "top_k": (-1, 2**31),
    "seed": (-(2**63) - 1, 2**64),
    "max_tokens": (0, -5, CONTEXT + 1),
    "min_tokens": (-1, CONTEXT + 1),
    "logprobs": (-1, 21),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INTEGERS.items() for value in values])
def test_integers_outside_of_their_bounds(field, value):
    error = refusal(**{field: value})
    assert error.field == f"sampling.{field}"
    assert error.message.startswith(f"{field} is {value}; it must lie between")


def test_more_min_tokens_than_max_tokens():
    error = refusal(min_tokens=9, max_tokens=8)
    assert error.field == "sampling.min_tokens"
    assert error.message == "min_tokens is 9, more than max_tokens, 8; lower min_tokens."


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**70, True, "3"])
def test_token_ids_outside_of_the_vocabulary(token_id):
    assert refusal(stop_token_ids=(token_id,)).field == "sampling.stop_token_ids"
    error = refusal(logit_bias={token_id: 1.0})
    assert error.field == "sampling.logit_bias"
    assert "0 to 99" in error.message


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 100.1, -100.1, "1"])
def test_biases_outside_of_their_bounds(bias):
    assert refusal(logit_bias={7: bias}).field == "sampling.logit_bias.7"


def test_too_many_of_a_kind():
    many = dict.fromkeys(range(1025), 0.0)
    with pytest.raises(RequestRefused, match="1025 entries; at most 1024") as caught:
        validate(SamplingParams(logit_bias=many), vocab_size=5000, max_model_len=CONTEXT)
    assert caught.value.field == "sampling.logit_bias"
    assert refusal(stop_token_ids=(1,) * 257).field == "sampling.stop_token_ids"
    assert refusal(stop=("x",) * 65).field == "sampling.stop"
    assert refusal(stop_exempt=(("a", "b"),) * 17).field == "sampling.stop_exempt"
    assert refusal(stop=("x" * 4097,)).field == "sampling.stop"


def test_empty_and_long_texts():
    assert refusal(stop=("a", "")).field == "sampling.stop[1]"
    assert refusal(stop_exempt=(("a", "b"), ("", "b"))).field == "sampling.stop_exempt[1]"
    assert refusal(stop_exempt=(("a", ""),)).field == "sampling.stop_exempt[0]"
    assert refusal(stop_exempt=(("a" * 257, "b"),)).field == "sampling.stop_exempt[0]"
