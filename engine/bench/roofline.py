"""The least time that this machine needs for a piece of work: its roofline (Williams, Waterman, Patterson, CACM 2009).

For each step of a run, the larger of two times, and the sum of that over the steps:

    time(step) = max(bytes / bandwidth, sum over formats of operations / rate)

    bytes      = layer weights + head (when the step makes logits) + KV of the contexts, read or written once
    operations = 2 x layer parameters x new tokens + 2 x head parameters x rows of logits          (linear layers)
               + 4 x heads x head dim x sum over new tokens of the tokens each sees x layers       (attention: q k^T and p v)

Bandwidth is the measured one for a working set of as many bytes as the step reads, so that a model that fits into a cache is
not measured against memory. The rate of the linear layers is the best that the machine has for the weights' format (see
`MATRIX_FORMATS`), that of attention the best for floats of 16 bits, or of 32 where q or KV have them. Norms, rotary embeddings,
activations in memory, sampling and everything in Python are free: no engine reaches this, and none passes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.bench.machine import Machine
from engine.models.spec import ModelSpec

_HALVES = ("float32", "bfloat16", "float16")
MATRIX_FORMATS: dict[str, tuple[str, ...]] = {
    "float32": ("float32",),
    "bfloat16": _HALVES,
    "float16": _HALVES,
    "int8": (*_HALVES, "int8"),
    "int4": (*_HALVES, "int8"),
    "gguf": (*_HALVES, "int8"),
}
"""Which instructions may multiply a weight of this format without making it coarser than its inputs are."""

FLOAT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
# Codes, and for int4 a scale and a minimum of 16 bits for each 32 of them; the head stays in int8.
_LAYER_BITS = {**FLOAT_BITS, "int8": 8.0, "int4": 5.0}
_HEAD_BITS = {**FLOAT_BITS, "int8": 8.0, "int4": 8.0}
_INT8_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Precision:
    """What numbers are kept in. dtype: of the activations; weights: dtype, or the quantisation that replaces it. kv: dtype or
    int8. `weight_bytes`: of layers and head together, where the format does not say (gguf)."""

    dtype: str
    weights: str
    kv: str
    weight_bytes: int | None = None

    @classmethod
    def of(cls, dtype: str, quantization: str = "none", kv_dtype: str = "auto", weight_bytes: int | None = None) -> Precision:
        """From the engine's settings; `dtype` is resolved."""
        return cls(
            dtype, dtype if quantization == "none" else quantization, dtype if kv_dtype == "auto" else kv_dtype, weight_bytes
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One step's batch: for each sequence its new tokens and its context with them; `rows`: sequences that get logits."""

    new: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Need:
    """What a step needs: `bytes`, operations of the linear layers and of attention."""

    bytes: float
    linear: float
    attention: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """seconds: the least time. memory_share: of those, the part in which memory bounds. instruction: of the linear layers."""

    seconds: float
    memory_share: float
    instruction: str


def layer_parameters(spec: ModelSpec) -> int:
    """Of the matrices of all layers."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.num_layers * spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)


def head_parameters(spec: ModelSpec) -> int:
    """Of the matrix that makes logits."""
    return spec.vocab_size * spec.hidden_size


def weight_bytes(spec: ModelSpec, precision: Precision) -> tuple[float, float]:
    """Bytes of the layers and of the head."""
    layers, head = layer_parameters(spec), head_parameters(spec)
    if precision.weight_bytes is not None:
        share = layers / (layers + head)
        return precision.weight_bytes * share, precision.weight_bytes * (1 - share)
    return layers * _LAYER_BITS[precision.weights] / 8, head * _HEAD_BITS[precision.weights] / 8


def kv_bytes_per_token(spec: ModelSpec, kv: str) -> float:
    """Bytes of keys and values of one token in one layer."""
    row = spec.head_dim + _INT8_SCALE_BYTES if kv == "int8" else spec.head_dim * FLOAT_BITS[kv] / 8
    return 2 * spec.num_kv_heads * row


def need_of(step: Step, spec: ModelSpec, precision: Precision) -> Need:
    """Bytes and operations of one step."""
    layers, head = weight_bytes(spec, precision)
    tokens = sum(step.new)
    kv = attention = 0.0
    for layer in spec.attention:
        read = seen = 0
        for new, context in zip(step.new, step.contexts, strict=True):
            # With a window, the first new token sees window - 1 tokens before it, and each sees the window at most.
            read += context if layer.window is None else min(context, new + layer.window - 1)
            seen += _seen(new, context, layer.window)
        kv += read * kv_bytes_per_token(spec, precision.kv)
        attention += 4.0 * layer.num_heads * layer.head_dim * seen
    linear = 2.0 * layer_parameters(spec) * tokens + 2.0 * head_parameters(spec) * step.rows
    return Need(layers + (head if step.rows else 0) + kv, linear, attention)


def _seen(new: int, context: int, window: int | None) -> int:
    """Tokens that the last `new` of `context` tokens see, added up."""
    first = context - new + 1
    if window is None or context <= window:
        return (first + context) * new // 2
    below = max(0, window - first)  # new tokens that still see everything
    return (2 * first + below - 1) * below // 2 + (new - below) * window


def roofline(steps: Iterable[Step], spec: ModelSpec, precision: Precision, machine: Machine) -> Roofline:
    """The least time for these steps, one after the other."""
    instruction, linear_rate = _best(machine, MATRIX_FORMATS[precision.weights])
    wide = "float32" in (precision.dtype, precision.kv)
    _, attention_rate = _best(machine, ("float32",) if wide else _HALVES)
    seconds = memory = 0.0
    for step in steps:
        need = need_of(step, spec, precision)
        reading = need.bytes / machine.bandwidth(int(need.bytes))
        computing = need.linear / linear_rate + need.attention / attention_rate
        seconds += max(reading, computing)
        memory += reading if reading >= computing else 0.0
    return Roofline(seconds, memory / seconds if seconds else 0.0, instruction)


def _best(machine: Machine, names: Sequence[str]) -> tuple[str, float]:
    name = max(names, key=lambda name: machine.rates.get(name, 0.0))
    return name, machine.rates[name]


def steps_of(requests: Sequence[tuple[int, int]], budget: int) -> list[Step]:
    """The steps of a run in which all requests, (prompt tokens, tokens to generate), are there from the beginning.

    As the engine plans them without a prefix cache: who decodes goes first with a token each, the rest of `budget` goes to
    prompts in their order; a prompt's last step makes its first token.
    """
    done = [0] * len(requests)
    made = [0] * len(requests)
    steps = []
    while any(count < tokens for count, (_, tokens) in zip(made, requests, strict=True)):
        left = budget
        new: dict[int, int] = {}
        for decoding in (True, False):
            for index, (prompt, tokens) in enumerate(requests):
                if (done[index] >= prompt) is not decoding or made[index] >= tokens or not left:
                    continue
                count = 1 if decoding else min(left, prompt - done[index])
                new[index] = count
                left -= count
        rows = 0
        for index, count in new.items():
            done[index] += count
            if done[index] >= requests[index][0]:
                made[index] += 1
                rows += 1
        steps.append(Step(tuple(new.values()), tuple(done[index] for index in new), rows))
    return steps


def decode_steps(batch: int, context: int, count: int) -> list[Step]:
    """`count` steps of `batch` sequences; in the first one each has `context` tokens of KV with the new one."""
    return [Step((1,) * batch, (context + step,) * batch, batch) for step in range(count)]
