"""The engine takes the fastest forward pass the machine can give, says which in one line, and serves without a compiler."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.forward import LayeredForward
from engine.forward_choice import choose_forward
from engine.kernels.cpu import library
from engine.kernels.cpu.decoder import NativeDecoder
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import load_library
from engine.kernels.reference import ReferenceAttention
from engine.models.registry import load_model

FITS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def kernel_dir(kernel_cache, tmp_path):
    """A directory of its own, with the kernels in it but nothing measured yet."""
    path = load_library(32, kernel_cache).path
    shutil.copy(path, tmp_path / path.name)
    return tmp_path


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def choose(path, dtype, kernel_dir, **settings):
    decoder = load_model(path, dtype=dtype).decoder
    return choose_forward(EngineConfig(model=Path("tiny"), threads=1, **settings), decoder, kernel_dir)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_pass_runs_in_cpp_and_one_line_says_how(tiny_checkpoint, kernel_dir, caplog, dtype):
    caplog.set_level(logging.INFO, logger="engine.forward_choice")
    path = tiny_checkpoint("llama", **FITS)
    chosen = choose(path, dtype, kernel_dir)
    assert isinstance(chosen, NativeDecoder)
    (record,) = caplog.records
    assert "runs in C++ on 1 threads" in record.message
    assert ("float32 by fma" in record.message) == (dtype == torch.float32)
    # What was measured is kept: the next start reads it.
    (kept,) = kernel_dir.glob("*.methods.json")
    before = kept.stat().st_mtime_ns
    again = choose(path, dtype, kernel_dir)
    assert again.formats == chosen.formats
    assert kept.stat().st_mtime_ns == before


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")
@pytest.mark.usefixtures("one_thread")
def test_a_model_that_cannot_run_whole_has_its_attention_in_cpp(tiny_checkpoint, kernel_dir, caplog):
    caplog.set_level(logging.INFO, logger="engine.forward_choice")
    chosen = choose(tiny_checkpoint("llama", **FITS, attention_bias=True), torch.float32, kernel_dir)
    assert isinstance(chosen, LayeredForward)
    assert isinstance(chosen.kernel, CpuAttention)
    (record,) = caplog.records
    assert "biases" in record.message


@pytest.mark.usefixtures("one_thread")
def test_without_a_compiler_plain_torch_serves_and_one_line_says_what_is_lost(tiny_checkpoint, tmp_path, caplog, monkeypatch):
    library._compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choose(tiny_checkpoint("llama", **FITS), torch.float32, tmp_path / "kernels")
    library._compiler.cache_clear()
    assert isinstance(chosen.kernel, ReferenceAttention)
    (record,) = caplog.records
    assert "no C++ compiler" in record.message


def test_reference_can_be_asked_for(tiny_checkpoint, tmp_path):
    chosen = choose(tiny_checkpoint("llama", **FITS), torch.float32, tmp_path, kernels="reference")
    assert isinstance(chosen.kernel, ReferenceAttention)
    assert not list(tmp_path.iterdir())
