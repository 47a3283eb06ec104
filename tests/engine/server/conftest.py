"""Engines to serve: one simulated, one that runs a tiny model."""

import pytest
from replica_harness import simulated


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint):
    return tiny_checkpoint("llama", max_position_embeddings=4096)


@pytest.fixture(params=["simulated", "real"])
def load(request):
    """Makes an engine core; once of each kind. `num_blocks` of 16 tokens, a context of 4096."""
    if request.param == "simulated":

        def load_simulated(num_blocks=256):
            return simulated(vocab_size=320, max_num_batched_tokens=256, num_blocks=num_blocks)

        return load_simulated
    directory = request.getfixturevalue("tiny_llama")

    def load_real(num_blocks=256):
        from engine.config import EngineConfig
        from engine.loading import load_engine

        return load_engine(
            EngineConfig(
                model=directory,
                dtype="float32",
                num_blocks=num_blocks,
                max_model_len=4096,
                max_num_seqs=32,
                max_num_batched_tokens=256,
                threads=1,
            )
        )

    return load_real
