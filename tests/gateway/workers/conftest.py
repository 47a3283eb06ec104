import pytest
from dispatch_bench import Bench


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    await bench.close()
