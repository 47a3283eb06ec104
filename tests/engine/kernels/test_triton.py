"""The Triton kernels: interpreted against the references, and compiled for GPUs that this machine need not have."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import make_batch, poisoned

pytest.importorskip("triton", reason="Triton is not installed: pip install 'turnkeep[gpu]'")

from triton_compiling import Compiling

from engine.forward import PagedAttention
from engine.kernels.interface import AttentionSpec
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.operations import TritonOperations
from engine.kernels.triton.sampling import TritonSampler
from engine.models.operations import RMSNorm
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

HERE = Path(__file__).parent
LEAST_SHARED = 99 << 10
"""Bytes of shared memory that a block may have on every GPU since sm_80."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_the_references():
    """In a process of its own: Triton decides when it is first imported whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(params=[80, 90], ids=lambda capability: f"sm_{capability}")
def compiling(request, monkeypatch, triton_cache):
    return Compiling(request.param, monkeypatch, triton_cache)


def check(kernels, names):
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        assert kernel.spilled <= 16, kernel  # a stack slot or two is no spilling
        assert kernel.shared <= LEAST_SHARED, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "io", "shape", "window"),
    [
        (torch.bfloat16, torch.bfloat16, (32, 8, 128), None),
        (torch.int8, torch.bfloat16, (14, 2, 64), None),
        (torch.float16, torch.float16, (9, 3, 80), 500),
    ],
)
def test_attention_compiles_without_spilling(compiling, memory, io, shape, window):
    heads, kv_heads, dim = shape
    step = make_batch([(1, 900), (200, 300)], 16, 100, torch.Generator())
    kv = poisoned(memory, 100, 2, 2, kv_heads, 16, dim)[:, 1]
    q, k = (torch.zeros(step.num_tokens, count, dim, dtype=io) for count in (heads, kv_heads))
    kernel = TritonAttention()
    kernel.write(kv, k, k, step)
    kernel.attend(q, kv, AttentionSpec(heads, kv_heads, dim, dim**-0.5, window), step)
    check(compiling.kernels, ["write_kv", "attend", "combine", "attend"])
    products = [kernel.ptx for kernel in compiling.kernels if kernel.name == "attend"]
    assert all("mma" in ptx for ptx in products), "the products do not run on the tensor cores"
    assert all("cp.async.cg" in ptx for ptx in products), "keys are not loaded 16 bytes at a time, ahead of their use"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "shape", "normed", "hidden"),
    [(torch.bfloat16, (32, 8, 128), True, 5120), (torch.int8, (9, 3, 64), False, 576)],
)
def test_operations_compile_without_spilling(compiling, memory, shape, normed, hidden):
    heads, kv_heads, dim = shape
    step = make_batch([(1, 30), (9, 20)], 16, 100, torch.Generator())
    specs = (AttentionSpec(heads, kv_heads, dim, 1.0),)

    class OnlyWrite(PagedAttention):
        def attend(self, layer, q):
            return q

    paged = OnlyWrite(TritonAttention(), poisoned(memory, 100, 1, 2, kv_heads, 16, dim), specs, step)

    def norm(size):
        return RMSNorm(torch.ones(size, dtype=torch.bfloat16), 1e-5)

    def zeros(*shape):
        return torch.zeros(step.num_tokens, *shape, dtype=torch.bfloat16)

    operations = TritonOperations()
    rotation = zeros(1, dim), zeros(1, dim)
    operations.attend(paged, 0, zeros(heads + 2 * kv_heads, dim), heads, rotation, (norm(dim), norm(dim)) if normed else None)
    operations.add_norm(zeros(hidden), zeros(hidden), norm(hidden))
    operations.gate(zeros(2 * 1536))
    check(compiling.kernels, ["rotate_write", "add_norm", "gate"])


@pytest.mark.slow
def test_sampling_compiles_without_spilling(compiling):
    vocab = 151936
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, logprobs=5)
    states = [SamplingState(params, np.zeros(0, dtype=np.uint32), 0, row, ()) for row in range(2)]
    logits = torch.zeros(2, vocab)
    chosen, *_ = TritonSampler().choose(logits, states, torch.zeros((2, vocab // 32), dtype=torch.int32))
    assert chosen.shape == (2,)
    with pytest.raises((RuntimeError, IndexError)):  # what nothing computed are no tokens
        TritonSampler().report(logits, torch.zeros(2, dtype=torch.int64), [5, 5])
    check(compiling.kernels, ["maxima", "thresholds", "race", "finish", "most_likely"])
    chosen_by = {kernel.name: kernel.ptx for kernel in compiling.kernels}
    # Logarithms near 1 decide the race: an approximation in hardware would be off by more than what parts the winners.
    assert "lg2.approx" not in chosen_by["race"]
    assert "div.rn.f32" in chosen_by["race"]
    assert "fma.rn.f32" not in chosen_by["thresholds"]
