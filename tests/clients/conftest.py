"""Gateways in processes of their own, as `turnkeep serve` starts them."""

import pytest
from live_gateway import serve


@pytest.fixture(scope="session")
def start_gateway():
    return serve


@pytest.fixture(scope="session")
def simulated(smollm2_dir, tmp_path_factory):
    """Two replicas without a model behind keys, recording."""
    record = tmp_path_factory.mktemp("recorded")
    options = ("--model", smollm2_dir, "--served-model-name", "smollm2", "--served-model-name", "gpt-4o", "--record", record)
    with serve("--simulate", "--replicas", 2, "--engine", "sim-time-scale=0", "--api-key", "sk-test", *options) as served:
        served.record = record
        yield served


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint):
    """A real engine with a tiny random model: nonsense as text, and whatever the grammar demands."""
    directory = tiny_checkpoint("llama", max_position_embeddings=4096)
    with serve("--model", directory, "--served-model-name", "tiny", "--num-blocks", 1024, "--dtype", "float32") as served:
        yield served
