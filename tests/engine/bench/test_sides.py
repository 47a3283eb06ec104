"""The engine's own side, and the protocol of the children that drive peers, on a tiny checkpoint."""

import importlib.util
import sys

import gguf
import pytest

from engine.bench.roofline import steps_of
from engine.bench.sides import OwnSide, PeerConfig, PeerError, PeerSide
from engine.config import EngineConfig
from engine.loading import load_engine
from tests.engine.checkpoints.wheels import write_gguf


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture
def own(model, model_cache_dir):
    settings = {"num_blocks": 64, "prefix_caching": False, "max_num_batched_tokens": 64, "max_draft_tokens": 0}
    config = EngineConfig(model=model, dtype="float32", **settings)
    side = OwnSide(load_engine(config, cache_dir=model_cache_dir))
    yield side
    side.close()


@pytest.fixture
def peer(model):
    side = PeerSide(PeerConfig("transformers", model, threads=1, dtype="float32", vocab=320))
    yield side
    side.close()


PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12]]


def test_our_side_runs_as_the_plan_of_steps_says(own):
    requests = [(5, 6), (130, 2), (3, 9)]
    steps = steps_of(requests, budget=64)
    before = own.engine.stats().steps_total
    prompts = [list(range(10, 10 + prompt)) for prompt, _ in requests]
    assert own.run(prompts, [tokens for _, tokens in requests]) > 0
    stats = own.engine.stats()
    assert stats.steps_total - before == len(steps)
    assert stats.generated_tokens_total == sum(tokens for _, tokens in requests) == sum(step.rows for step in steps)


def test_our_side_decodes_what_was_asked_and_times_every_step(own):
    assert own.begin(PROMPTS, room=40) > 0
    assert own.engine.stats().generated_tokens_total == 2
    seconds = own.decode(7)
    assert own.engine.stats().generated_tokens_total == 2 + 2 * 7
    assert sum(own.times.steps) == pytest.approx(seconds)
    assert len(own.times.steps) == 7
    assert all(0 < forward < step for forward, step in zip(own.times.forward, own.times.steps, strict=True))
    assert all(overhead > 0 for overhead in own.times.overheads())
    own.end()
    assert not own.engine.has_work()
    own.engine.check_integrity()


def test_a_child_answers_every_command(peer):
    assert peer.version
    assert peer.settings == {"dtype": "float32"}
    assert peer.run([*PROMPTS, [1, 2, 3]], [3, 3, 2]) > 0
    assert peer.begin(PROMPTS, room=20) > 0
    assert peer.decode(4) > 0
    peer.end()
    assert peer.cpu_seconds() > 0


def test_the_child_computes_the_model(model, own, peer):
    """The peer's driver makes the tokens that our engine makes: prompts reach it whole, and its cache is used rightly."""
    import torch

    from engine.bench.peers.driver import Transformers

    driver = Transformers()
    threads = torch.get_num_threads()
    driver.load(str(model), threads=threads, dtype="float32", vocab=320, options={})
    driver.begin(PROMPTS, 8)
    theirs = [driver.last.flatten().tolist()]
    for _ in range(5):
        driver.decode(1)
        theirs.append(driver.last.flatten().tolist())
    made = {}
    made_by_engine = own._made

    def collect(chunks):
        for name, chunk in chunks:
            made.setdefault(name, []).extend(getattr(chunk, "token_ids", ()))
        return made_by_engine(chunks)

    own._made = collect
    own.run(PROMPTS, [6, 6])
    assert list(made.values()) == [list(column) for column in zip(*theirs, strict=True)]


def test_a_peer_that_fails_says_why_and_can_go_on(peer):
    with pytest.raises(PeerError, match=r"^transformers failed: .*"):
        peer.run([["no", "ids"]], [1])
    assert peer.run(PROMPTS, [1, 1]) > 0


def test_a_peer_that_dies_is_an_error_with_its_last_words(model, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho not enough cheese >&2\n")
    python.chmod(0o755)
    with pytest.raises(PeerError, match="transformers ended without an answer; the last it printed: not enough cheese"):
        PeerSide(PeerConfig("transformers", model, 1, "float32", 320, python=str(python)))


def test_a_peer_whose_python_is_not_there(model):
    with pytest.raises(PeerError, match=r"/no/python, the Python for vllm, cannot be run"):
        PeerSide(PeerConfig("vllm", model, 1, "float32", 320, python="/no/python"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_a_peer_that_is_not_installed(model):
    with pytest.raises(PeerError) as raised:
        PeerSide(PeerConfig("vllm", model, 1, "float32", 320))
    assert str(raised.value) == (
        f"vllm cannot be imported by {sys.executable} (No module named 'vllm'). Install it (pip install vllm), name the Python "
        "of an environment that has it (--peer-python vllm=PATH), or leave out --vs vllm."
    )


@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="openvino-genai is not installed here")
def test_openvino_makes_what_was_asked(model, tmp_path):
    write_gguf(model, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F16)
    options = {"INFERENCE_PRECISION_HINT": "f32", "cache_size": "1"}
    side = PeerSide(PeerConfig("openvino", tmp_path / "tiny.gguf", 1, "float32", 320, options=options))
    try:
        assert side.run(PROMPTS, [3, 5]) > 0
        assert side.begin(PROMPTS, 20) > 0
        assert side.decode(4) > 0
        side.end()
    finally:
        side.close()
