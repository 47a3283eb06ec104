"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama's layers with biases on q, k, v; upper ones may have a window."""

from __future__ import annotations

from engine.models.config import ConfigReader, base_spec, layer_windows
from engine.models.spec import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def read_spec(config: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """Raises CheckpointError."""
    return base_spec(
        config,
        generation,
        architecture=ARCHITECTURE,
        windows=layer_windows(config),
        num_kv_heads=config.integer("num_key_value_heads", 32),
        head_dim=config.integer("head_dim") if config.has("head_dim") else None,
        attention_bias=True,
    )
