"""Reads config.json and generation_config.json without transformers, and says which field is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoints.catalog import read_json
from engine.checkpoints.errors import CheckpointError
from engine.kernels.interface import AttentionSpec
from engine.models.spec import ROPE_KINDS, ModelSpec, RopeSpec

_LAYER_KINDS = ("full_attention", "sliding_attention")


class ConfigReader:
    """Typed access to one JSON object. Every getter raises CheckpointError naming file, field, value and what is wanted."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(field, value, "a positive integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(field, value, "a positive number")
        return float(value)

    def optional_number(self, field: str) -> float | None:
        return self.number(field) if self.has(field) else None

    def flag(self, field: str, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self._wrong(field, value, "a string")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.values.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self._wrong(field, value, "a token id or a list of token ids")
        return tuple(ids)

    def strings(self, field: str) -> tuple[str, ...] | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, value, "a list of strings")
        return tuple(value)

    def child(self, field: str) -> ConfigReader | None:
        """A nested object; None when it is absent, null or empty."""
        value = self.values.get(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(field, value, "an object")
        return ConfigReader(value, f"{self.where}, {field}")

    def _get(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where}: the field {field} is missing; fetch the model again.")
        return default

    def _wrong(self, field: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {field} must be {wanted}, is {value!r:.100}.")


def read_config(directory: Path) -> tuple[ConfigReader, ConfigReader]:
    """(config.json, generation_config.json) of a model; the second is empty where there is none. Raises CheckpointError."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    config = directory / "config.json"
    return ConfigReader(read_json(config), str(config)), ConfigReader(generation, str(path))


def base_spec(
    config: ConfigReader,
    generation: ConfigReader,
    *,
    architecture: str,
    windows: tuple[int | None, ...],
    num_kv_heads: int,
    head_dim: int | None = None,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """What all architectures have in common. `windows`: one per layer. `head_dim` None: hidden size over heads."""
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{config.where}: hidden_act {activation} is not supported; silu is.")
    if config.has("quantization_config"):
        raise CheckpointError(
            f"{config.where}: the weights are quantised, which is not supported. Use the model's bf16 version."
        )
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(f"{config.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}.")
        head_dim = hidden // heads
    if heads % num_kv_heads:
        raise CheckpointError(
            f"{config.where}: num_attention_heads {heads} is no multiple of num_key_value_heads {num_kv_heads}."
        )
    if head_dim % 2:
        raise CheckpointError(f"{config.where}: a head of {head_dim} dimensions cannot be rotated; it takes an even number.")
    eos = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    bos = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
    max_position = config.integer("max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention=tuple(AttentionSpec(heads, num_kv_heads, head_dim, head_dim**-0.5, window) for window in windows),
        rope=read_rope(config, head_dim, max_position),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def layer_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Qwen's windows: `layer_types` when given, else every layer from `max_window_layers` on; none unless
    `use_sliding_window` is true."""
    layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    kinds = config.strings("layer_types")
    if kinds is None:
        first = config.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise CheckpointError(f"{config.where}: max_window_layers must be a whole number, is {first!r}.")
        return tuple(window if index >= first else None for index in range(layers))
    if len(kinds) != layers or any(kind not in _LAYER_KINDS for kind in kinds):
        raise CheckpointError(f"{config.where}: layer_types must name {' or '.join(_LAYER_KINDS)} for each of {layers} layers.")
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(f"{config.where}: layer_types has sliding layers, but use_sliding_window is not true.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_rope(config: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """Rotary settings in either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    As in transformers, `rope_scaling` wins where both are given, a top-level `original_max_position_embeddings` over a nested
    one, and a theta among the parameters over one beside them.
    """
    rope = config.child("rope_scaling") or config.child("rope_parameters") or ConfigReader({}, config.where)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise CheckpointError(f"{rope.where}: rotary settings that differ by layer are not supported.")
    kind = rope.text("rope_type", rope.text("type", "default"))
    known = next((name for name in ROPE_KINDS if name == kind), None)
    if known is None:
        raise CheckpointError(
            f"{rope.where}: rope scaling {kind!r} is not supported; those there are: {', '.join(ROPE_KINDS)}."
        )
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"{rope.where}: partial_rotary_factor {partial} is not supported; whole heads are rotated.")
    original = max_position
    if known in ("llama3", "yarn"):
        original = rope.integer("original_max_position_embeddings", max_position)
        original = config.integer("original_max_position_embeddings", original)
    return RopeSpec(
        kind=known,
        theta=rope.number("rope_theta", config.number("rope_theta", 10_000.0)),
        dim=head_dim,
        max_position=max_position,
        original_max_position=original,
        factor=_factor(rope, known, max_position, original),
        low_freq_factor=rope.number("low_freq_factor") if known == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if known == "llama3" else 4.0,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=_positive(rope, "mscale"),
        mscale_all_dim=_positive(rope, "mscale_all_dim"),
        attention_factor=rope.optional_number("attention_factor") if known == "yarn" else None,
        truncate=rope.flag("truncate", True),
    )


def _factor(rope: ConfigReader, kind: str, max_position: int, original: int) -> float:
    if kind == "default":
        return 1.0
    factor = rope.number("factor", max_position / original if kind == "yarn" else None)
    if factor < 1.0:
        raise CheckpointError(f"{rope.where}: factor must be at least 1, is {factor}.")
    return factor


def _positive(rope: ConfigReader, field: str) -> float | None:
    """A zero counts as absent, as in transformers."""
    return None if rope.values.get(field) in (None, 0) else rope.number(field)
