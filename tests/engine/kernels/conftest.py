import pytest


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """Where the kernels of this test session are built: one build for each head dim and processor."""
    return tmp_path_factory.mktemp("kernel-cache")
