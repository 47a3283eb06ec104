"""Qwen3, the dense models (arXiv 2505.09388): Qwen2's layers with RMS norms over each head of q and k in place of biases."""

from __future__ import annotations

from engine.models.config import ConfigReader, base_spec, layer_windows
from engine.models.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def read_spec(config: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """Raises CheckpointError."""
    bias = config.flag("attention_bias", False)
    return base_spec(
        config,
        generation,
        architecture=ARCHITECTURE,
        windows=layer_windows(config),
        num_kv_heads=config.integer("num_key_value_heads", 32),
        head_dim=config.integer("head_dim", 128),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
