"""The C++ attention kernel against float64: fresh random batches, layouts and shapes, poisoned outputs and neighbours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import TOLERANCE, check_attention, exact, make_batch, poisoned, tolerance_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels import int8_kv
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import KernelBuildError, _is_whole, _seal, load_library
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceAttention

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


sequences = st.lists(
    st.integers(1, 700).flatmap(lambda context: st.tuples(st.integers(1, min(context, 200)), st.just(context))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(9, 3, 64), (4, 4, 32), (8, 1, 128), (6, 2, 80), (2, 1, 16), (14, 2, 64)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=st.sampled_from([None, 1, 5, 100, 257]),
    block_size=st.sampled_from([16, 4, 7]),
    threads=st.sampled_from([1, 2, 3]),
    batch=sequences,
    seed=st.integers(0, 2**31),
)
def test_attention_equals_float64(cache_dir, shape, dtype, window, block_size, threads, batch, seed):
    kernel = CpuAttention.build(shape[2], threads, cache_dir)
    check_attention(kernel, shape, dtype, window, block_size, batch, seed, tolerance=tolerance_of(kernel))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    magnitude=st.sampled_from([1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e34]),
    values=st.sampled_from(["normal", "ties", "outlier"]),
    io=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_both_kernels_quantise_to_the_same_bits(cache_dir, magnitude, values, io, seed):
    generator = torch.Generator().manual_seed(seed)
    step = make_batch([(9, 20), (5, 5), (1, 3)], 7, 9, generator)
    rows = torch.randn(2, step.num_tokens, 3, 32, generator=generator)
    if values == "ties":  # with a largest magnitude of 127 every half is one
        rows = torch.randint(-253, 254, rows.shape, generator=generator) / 2
        rows[..., 0] = 127
    elif values == "outlier":
        rows[..., 3] *= 1000
    rows = (rows * magnitude).to(io)
    rows[:, 2] = 0
    rows[0, 4, 1, 7], rows[1, 5, 0, 3] = torch.inf, torch.nan
    reference, built = (poisoned(torch.int8, 9, 2, 2, 3, 7, 32)[:, 1] for _ in range(2))
    ReferenceAttention().write(reference, *rows, step)
    CpuAttention.build(32, 1, cache_dir).write(built, *rows, step)
    assert torch.equal(int8_kv.codes(reference), int8_kv.codes(built))
    assert torch.equal(int8_kv.scales(reference).isnan(), int8_kv.scales(built).isnan())
    assert torch.equal(int8_kv.scales(reference).nan_to_num(), int8_kv.scales(built).nan_to_num())
    kept = int8_kv.dequantize(built).permute(0, 3, 1, 2, 4).reshape(63, 2, 3, 32)[step.slots].transpose(0, 1)
    poison = torch.zeros(kept.shape[:-1], dtype=torch.bool)
    poison[0, 4, 1] = poison[1, 5, 0] = True
    assert torch.equal(kept.isnan().all(-1), poison)
    assert torch.equal(kept.isnan().any(-1), poison)
    plain, exact_rows = kept[~poison], rows.float()[~poison]
    largest = exact_rows.abs().amax(-1, keepdim=True)
    assert ((plain - exact_rows).abs() <= largest / 254 * 1.0001 + 1e-30).all()


def test_write_touches_its_slots_only(cache_dir):
    step = make_batch([(3, 10), (1, 5)], 4, 8, torch.Generator().manual_seed(1))
    kv = torch.zeros(8, 2, 2, 4, 16)
    k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    CpuAttention.build(16, 1, cache_dir).write(kv, k, v, step)
    by_slot = kv.permute(0, 3, 1, 2, 4).reshape(32, 2, 2, 16)
    assert torch.equal(by_slot[step.slots], torch.stack((k, v), 1))
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[step.slots] = False
    assert not by_slot[untouched].any()


def test_a_strided_query_is_read_where_it_lies(cache_dir):
    step = make_batch([(20, 20)], 16, 3, torch.Generator().manual_seed(1))
    fused = torch.randn(20, 4 + 2 + 2, 32)
    kernel, spec = CpuAttention.build(32, 1, cache_dir), AttentionSpec(4, 2, 32, 0.2)
    kv = torch.zeros(3, 2, 2, 16, 32)
    kernel.write(kv, fused[:, 4:6], fused[:, 6:], step)
    assert torch.equal(kernel.attend(fused[:, :4], kv, spec, step), kernel.attend(fused[:, :4].contiguous(), kv, spec, step))


def test_q_of_another_dtype_than_the_memory(cache_dir):
    """The layers may compute in another dtype than KV is kept in: what is written and asked is converted, answers as well."""
    step = make_batch([(3, 3), (1, 1)], 16, 4, torch.Generator().manual_seed(1))
    kernel, spec = CpuAttention.build(16, 1, cache_dir), AttentionSpec(2, 1, 16, 0.25)
    q, k, v = torch.randn(4, 2, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    for io in (torch.float32, torch.bfloat16, torch.float16):
        for dtype in TOLERANCE:
            memories = []
            for each in (kernel, ReferenceAttention()):
                kv = poisoned(dtype, 4, 2, 1, 16, 16)
                each.write(kv, k.to(io), v.to(io), step)
                out = each.attend(q.to(io), kv, spec, step)
                assert out.dtype == io
                wanted = exact(q.to(io), kv, spec, step)
                assert (out.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
                memories.append(kv)
            assert torch.equal(memories[0].view(torch.uint8), memories[1].view(torch.uint8))


def test_what_the_kernel_does_not_take_is_refused(cache_dir):
    step = make_batch([(1, 1)], 16, 2, torch.Generator().manual_seed(1))
    kernel = CpuAttention.build(16, 1, cache_dir)
    with pytest.raises(ValueError, match="float64"):
        kernel.attend(torch.zeros(1, 1, 16), torch.zeros(2, 2, 1, 16, 16).double(), AttentionSpec(1, 1, 16, 1.0), step)
    with pytest.raises(ValueError, match="32 dims"):
        kernel.attend(torch.zeros(1, 1, 32), torch.zeros(2, 2, 1, 16, 16), AttentionSpec(1, 1, 32, 1.0), step)
    with pytest.raises(ValueError, match="another head_dim"):
        kernel.write(torch.zeros(2, 2, 1, 16, 32), torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), step)


def test_a_build_is_made_once_and_an_impossible_one_is_a_sentence(tmp_path, monkeypatch):
    load_library(16, tmp_path)
    (built,) = tmp_path.iterdir()
    stamp = built.stat().st_mtime_ns
    load_library(16, tmp_path)
    assert [(p, p.stat().st_mtime_ns) for p in tmp_path.iterdir()] == [(built, stamp)]
    with pytest.raises(KernelBuildError, match="head_dim 20"):
        load_library(20, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / built.name).write_bytes(b"not a library")
    _seal(elsewhere / built.name)
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        load_library(16, elsewhere)


def test_a_cut_file_in_the_cache_is_built_again(tmp_path):
    """Loading it as it is would end the process with a bus error, at every start."""
    load_library(16, tmp_path)
    (built,) = tmp_path.iterdir()
    whole = built.read_bytes()
    built.unlink()  # it is mapped into this process; what is written now is another file
    for kept in (0, 20, len(whole) - 40, len(whole) - 1, 20_000):
        built.write_bytes(whole[:kept])
        assert not _is_whole(built)
    assert load_library(16, tmp_path).matrix_bytes(0, 1, 16) == 32 * 16 * 4
    assert [(path, _is_whole(path)) for path in tmp_path.iterdir()] == [(built, True)]


@pytest.mark.parametrize("content", [b"\x7fELFgarbage", b"#!/nonexistent\n"])
def test_a_compiler_that_cannot_be_run_is_a_sentence(tmp_path, monkeypatch, content):
    compiler = tmp_path / "g++"
    compiler.write_bytes(content)
    compiler.chmod(0o755)
    monkeypatch.setattr("engine.kernels.cpu.library._compiler", lambda: str(compiler))
    with pytest.raises(KernelBuildError, match=r"g\+\+ cannot be run"):
        load_library(16, tmp_path / "cache")


def test_a_team_is_not_taken_down_under_a_call(cache_dir):
    """Closing waits for the call that computes; a process that ends while one does ends all the same."""
    code = """
import sys, threading, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cpu_attention import AttentionSpec, CpuAttention, make_batch

kernel = CpuAttention.build(32, 3, Path(sys.argv[2]))
step, spec = make_batch([(300, 900)], 16, 60, torch.Generator().manual_seed(1)), AttentionSpec(8, 2, 32, 0.1)
kv, q = torch.zeros(60, 2, 2, 16, 32), torch.randn(300, 8, 32)
real, calls = kernel.library.attention, []
kernel.library.attention = lambda args: calls.append(args) or real(args)
wanted = kernel.attend(q, kv, spec, step)
begun, results = threading.Event(), []

def compute(times):
    for _ in range(times):
        begun.set()
        results.append(torch.equal(kernel.attend(q, kv, spec, step), wanted))

thread = threading.Thread(target=compute, args=(3,))
thread.start()
begun.wait()
thread.join()
assert results == [True] * 3
begun.clear()

def compute_on():  # no torch here: it does not survive the end of the interpreter in another thread
    begun.set()
    while True:
        real(calls[0])

threading.Thread(target=compute_on, daemon=True).start()
begun.wait()
"""
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, folder, str(cache_dir)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("spread", "bias"), [(1, 0), (4, 0), (8, 0), (1, 300), (4, 100)])
def test_prefill_loses_less_than_bfloat16_memory_does(cache_dir, spread, bias):
    """The kernel's own error, over keys and values as they are kept, beside what keeping them in bfloat16 or int8 costs."""
    generator = torch.Generator().manual_seed(spread + bias)
    step, spec = make_batch([(700, 700)], 16, 50, generator), AttentionSpec(6, 2, 64, 0.125)
    kernel = CpuAttention.build(64, 2, cache_dir)
    k, v = torch.randn(2, 700, 2, 64, generator=generator)
    k[:, :, ::16] += torch.randn(2, 4, generator=generator) * bias  # Qwen2's key biases are that large
    q = (torch.randn(700, 6, 64, generator=generator) * spread).bfloat16().float()
    precise = poisoned(torch.float32, 50, 2, 2, 16, 64)
    ReferenceAttention().write(precise, k, v, step)
    wanted = exact(q, precise, spec, step)
    lost = {}
    for dtype in (torch.bfloat16, torch.float16, torch.int8):
        kv = poisoned(dtype, 50, 2, 2, 16, 64)
        kernel.write(kv, k, v, step)
        kept = exact(q, kv, spec, step)
        lost[dtype] = float((kept - wanted).norm())
        computed = float((kernel.attend(q, kv, spec, step).double() - kept).norm())
        assert computed < lost[torch.bfloat16]
    assert computed < 0.5 * lost[torch.int8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize(("keys", "values"), [(1e4, 1.0), (1.0, 1e5), (1e6, 1e6)])
def test_huge_keys_and_values_do_not_overflow(cache_dir, dtype, keys, values):
    """Half precision ends at 65504: what would leave it is computed in float32, chunk by chunk."""
    generator = torch.Generator().manual_seed(1)
    step, spec = make_batch([(150, 400)], 16, 30, generator), AttentionSpec(4, 2, 64, 0.125 / keys)
    past = make_batch([(400, 400)], 16, 30, None, step.block_tables)
    k, v = torch.randn(2, 400, 2, 64, generator=generator)
    k[200:], v[100:200] = k[200:] * keys, v[100:200] * values
    q = torch.randn(150, 4, 64, generator=generator)
    kv, kernel = poisoned(dtype, 30, 2, 2, 16, 64), CpuAttention.build(64, 1, cache_dir)
    kernel.write(kv, k, v, past)
    wanted, got = exact(q, kv, spec, step), kernel.attend(q, kv, spec, step)
    assert got.isfinite().all()
    assert (got - wanted).norm() < 0.02 * wanted.norm()


def test_poison_stays_with_the_tokens_that_see_it(cache_dir):
    """A key or value that is NaN spoils the answers of later tokens of its sequence and no others."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        step, spec = make_batch([(300, 300), (200, 200), (1, 90)], 16, 50, generator), AttentionSpec(4, 2, 64, 0.125)
        kernel = CpuAttention.build(64, 2, cache_dir)
        q, k, v = torch.randn(501, 4, 64), torch.randn(501, 2, 64), torch.randn(501, 2, 64)
        clean = poisoned(dtype, 50, 2, 2, 16, 64)
        kernel.write(
            clean, torch.randn(90, 2, 64), torch.randn(90, 2, 64), make_batch([(90, 90)], 16, 50, None, step.block_tables[2:])
        )
        spoilt = clean.clone()
        kernel.write(clean, k, v, step)
        k[150, 1, 5], v[260, 0, 9] = torch.nan, torch.inf
        kernel.write(spoilt, k, v, step)
        wanted, got = kernel.attend(q, clean, spec, step), kernel.attend(q, spoilt, spec, step)
        assert not got[150:300, 2:].isfinite().any(-1).any()
        assert not got[260:300, :2].isfinite().all(-1).any()
        assert got[300:].isfinite().all()
        assert torch.equal(got[300:], wanted[300:])
