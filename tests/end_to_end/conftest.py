"""The whole stack on this machine: the embedded model behind two replicas, keys, spans to a real receiver, turns recorded."""

from types import SimpleNamespace

import httpx2
import openai
import pytest
from live_gateway import otlp_collector, serve

MODEL = "smollm2"
KEYS = ("sk-alice", "sk-bob")


@pytest.fixture(scope="session")
def collector():
    with otlp_collector() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def stack(smollm2_dir, collector, tmp_path_factory):
    record = tmp_path_factory.mktemp("recorded")
    # The first one may read the metrics.
    keys = ["--api-key", f"{KEYS[0]} admin", "--api-key", KEYS[1]]
    options = ("--otlp", collector.url, "--record", record, "--num-blocks", 1500, *keys)
    with serve("--model", smollm2_dir, "--served-model-name", MODEL, "--replicas", 2, *options) as served:
        yield SimpleNamespace(url=served.url, api=served.api, record=record, process=served.process, lines=served.lines)


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=stack.api, api_key=KEYS[0], max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def web(stack):
    with httpx2.Client(base_url=stack.url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=120) as made:
        yield made
