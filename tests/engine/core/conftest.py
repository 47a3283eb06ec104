import pytest
import torch

from engine.models.registry import load_model


@pytest.fixture(scope="module")
def smallest(tiny_checkpoint):
    """A model for engines of which only the decisions are looked at."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return load_model(tiny_checkpoint("llama", max_position_embeddings=100_000, **shape), dtype=torch.float32)
