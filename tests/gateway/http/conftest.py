import pytest
from fake_dispatcher import write_model
from gateway_harness import run_gateway


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def gateway(tiny_model):
    async with run_gateway(tiny_model) as running:
        yield running
