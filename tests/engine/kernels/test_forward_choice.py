"""The engine takes the fastest forward pass the machine can give, says which in one line, and serves without a compiler."""

import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.forward import LayeredForward
from engine.forward_choice import choose_forward, graph_capture, row_chooser
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


class OnGPU:
    """A decoder as far as the choice looks at it, on a GPU of some compute capability."""

    def __init__(self, decoder, monkeypatch, capability=(9, 0), index=0):
        self.spec = decoder.spec
        self.device = torch.device("cuda", index)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    def choose(self, **settings):
        return choose_forward(EngineConfig(model=Path("tiny"), **settings), self, Path("nowhere"))


@pytest.fixture
def decoder(tiny_checkpoint):
    return load_model(tiny_checkpoint("llama", **FITS), dtype=torch.float32).decoder


def test_a_gpu_gets_the_triton_kernels_a_sampler_and_graphs(decoder, monkeypatch, caplog):
    pytest.importorskip("triton", reason="Triton is not installed")
    from engine.kernels.triton.attention import TritonAttention
    from engine.kernels.triton.operations import TritonOperations
    from engine.kernels.triton.sampling import TritonSampler

    caplog.set_level(logging.INFO, logger="engine.forward_choice")
    chosen = OnGPU(decoder, monkeypatch).choose()
    assert isinstance(chosen.kernel, TritonAttention)
    assert isinstance(chosen.operations, TritonOperations)
    assert isinstance(row_chooser(chosen), TritonSampler)
    assert graph_capture(chosen) is not None
    (record,) = caplog.records
    assert "run in Triton on cuda:0" in record.message


def test_on_a_gpu_the_reference_can_be_asked_for(decoder, monkeypatch):
    chosen = OnGPU(decoder, monkeypatch).choose(kernels="reference")
    assert isinstance(chosen.kernel, ReferenceAttention)
    assert chosen.operations is row_chooser(chosen) is graph_capture(chosen) is None


@pytest.mark.parametrize(
    ("absent", "capability", "reason"),
    [(True, (9, 0), "Triton is not installed; install it with `pip install"), (False, (7, 5), "compute capability 8.0")],
)
def test_a_gpu_without_triton_serves_in_plain_torch_and_one_line_says_why(
    decoder, monkeypatch, caplog, absent, capability, reason
):
    if absent:
        for name in [name for name in sys.modules if name.startswith("engine.kernels.triton.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton", None)
    chosen = OnGPU(decoder, monkeypatch, capability).choose()
    assert isinstance(chosen.kernel, ReferenceAttention)
    assert chosen.operations is row_chooser(chosen) is graph_capture(chosen) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message


def test_another_gpu_than_the_first_is_refused_with_the_way_to_have_it(decoder, monkeypatch):
    with pytest.raises(ConfigError, match=r"device is cuda:2; .* CUDA_VISIBLE_DEVICES=2"):
        OnGPU(decoder, monkeypatch, index=2).choose()
