"""Mistral (arXiv 2310.06825): Llama's layers without biases; every layer may have a sliding window."""

from __future__ import annotations

from engine.models.config import ConfigReader, base_spec
from engine.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"


def read_spec(config: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """Raises CheckpointError. A `sliding_window` that is absent means 4096, one that is null means none, as in transformers."""
    window = None
    if "sliding_window" not in config.values or config.has("sliding_window"):
        window = config.integer("sliding_window", 4096)
    return base_spec(
        config,
        generation,
        architecture=ARCHITECTURE,
        windows=(window,) * config.integer("num_hidden_layers"),
        num_kv_heads=config.integer("num_key_value_heads", 8),
        head_dim=config.integer("head_dim") if config.has("head_dim") else None,
    )
