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
from engine.kernels.reference import ReferenceAttention
from engine.models.registry import load_model

FITS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


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
def test_float32_runs_its_layers_around_the_cpp_kernel_and_bfloat16_runs_natively(tiny_checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="engine.forward_choice")
    path = tiny_checkpoint("llama", **FITS)
    layered = choose(path, torch.float32, tmp_path)
    assert isinstance(layered, LayeredForward)
    assert isinstance(layered.kernel, CpuAttention)
    whole = choose(path, torch.bfloat16, tmp_path)
    if layered.kernel.has_amx:
        assert isinstance(whole, NativeDecoder)
        assert "whole forward pass" in caplog.records[-1].message
    else:
        assert isinstance(whole, LayeredForward)
        assert "AMX" in caplog.records[-1].message
    assert len(caplog.records) == 2


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
