"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and models of its build, SmolLM2 among them.

Grouped-query attention over the whole context, SwiGLU, RMS norms, rotary embedding; biases only where the config says so.
"""

from __future__ import annotations

from engine.models.config import ConfigReader, base_spec
from engine.models.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def read_spec(config: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """Raises CheckpointError."""
    bias = config.flag("attention_bias", False)
    return base_spec(
        config,
        generation,
        architecture=ARCHITECTURE,
        windows=(None,) * config.integer("num_hidden_layers"),
        num_kv_heads=config.integer("num_key_value_heads", config.integer("num_attention_heads")),
        head_dim=config.integer("head_dim") if config.has("head_dim") else None,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
