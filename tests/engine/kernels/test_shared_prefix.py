"""Sequences that share the blocks of a prefix: the C++ kernel attends to it once for all of them."""

import shutil

import pytest
import torch
from attention_cases import exact, make_batch, poisoned, tolerance_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceAttention

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")


def shared_tables(families, block_size, generator):
    """families: (shared blocks, contexts) each. -> tables [sequences, blocks], and how many blocks there are. Sequences of a
    family have their first blocks in common."""
    order = iter(torch.randperm(4000, generator=generator).add_(1).tolist())
    rows = []
    for blocks, contexts in families:
        common = [next(order) for _ in range(blocks)]
        rows += [common + [next(order) for _ in range(-(-context // block_size) - blocks)] for context in contexts]
    width = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)


def answer(kernel, tables, sequences, shape, dtype, window, block_size, seed):
    """-> what the kernel answers and float64's answer, over memory in which everything else is poison."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    step = make_batch(sequences, block_size, 0, generator, tables)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window)
    kv = poisoned(dtype, 4001, 1, 2, kv_heads, block_size, dim)[:, 0]
    io = torch.float32 if dtype == torch.int8 else dtype
    used = tables.flatten().unique()
    before = make_batch([(block_size, block_size)] * len(used), block_size, 0, None, used[:, None])
    # every slot of a used block
    past = torch.randn(2, before.num_tokens, kv_heads, dim, generator=generator).to(io)
    ReferenceAttention().write(kv, *past, before)
    q, k, v = (torch.randn(step.num_tokens, h, dim, generator=generator).to(io) for h in (heads, kv_heads, kv_heads))
    kernel.write(kv, k, v, step)
    return kernel.attend(q, kv, spec, step), exact(q, kv, spec, step)


family = st.tuples(st.integers(0, 30), st.lists(st.integers(1, 300), min_size=1, max_size=24))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(9, 3, 64), (8, 1, 128), (14, 2, 64), (4, 4, 64)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.int8, torch.float32]),
    window=st.sampled_from([None, None, None, 300]),
    block_size=st.sampled_from([16, 32]),
    threads=st.sampled_from([1, 2, 3]),
    families=st.lists(family, min_size=1, max_size=3),
    prefill=st.sampled_from([None, (40, 60)]),
    seed=st.integers(0, 2**31),
)
def test_families_of_sequences(kernel_cache, shape, dtype, window, block_size, threads, families, prefill, seed):
    kernel = CpuAttention.build(shape[2], threads, kernel_cache)
    generator = torch.Generator().manual_seed(seed)
    families = [(blocks, [blocks * block_size + own for own in own_tokens]) for blocks, own_tokens in families]
    sequences = [(1, context) for _, contexts in families for context in contexts]
    if prefill is not None:  # between decoding sequences: a family may be cut in two
        families.append((0, [prefill[1]]))
        sequences.append(prefill)
    tables = shared_tables(families, block_size, generator)
    out, wanted = answer(kernel, tables, sequences, shape, dtype, window, block_size, seed)
    assert torch.isfinite(out).all()
    error = float((out.double() - wanted).abs().max() / wanted.abs().max())
    assert error <= tolerance_of(kernel)[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prefix_is_computed_once_where_that_is_allowed(kernel_cache, dtype):
    """Which way was taken shows in the last bits: with the prefix in blocks of each sequence's own, the same numbers are added
    in another order. In float32 they may not differ."""
    kernel = CpuAttention.build(64, 2, kernel_cache)
    contexts = [1000 + 7 * i for i in range(16)]
    sequences = [(1, context) for context in contexts]
    shape, generator = (9, 3, 64), torch.Generator().manual_seed(5)
    shared = shared_tables([(60, contexts)], 16, generator)
    heads, kv_heads, dim = shape
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    apart = shared.clone()
    fresh = torch.arange(int(shared.max()) + 1, int(shared.max()) + 1 + 15 * 60, dtype=torch.int32).view(15, 60)
    apart[1:, :60] = fresh
    kv = torch.randn(int(apart.max()) + 1, 2, kv_heads, 16, dim, generator=generator).to(dtype)
    for row in range(15):
        kv[fresh[row].long()] = kv[shared[0, :60].long()]
    q = torch.randn(16, heads, dim, generator=generator).to(dtype)
    steps = [make_batch(sequences, 16, 0, None, tables) for tables in (shared, apart)]
    together, alone = (kernel.attend(q, kv, spec, step) for step in steps)
    wanted = exact(q, kv, spec, steps[0])
    for out in (together, alone):
        assert float((out.double() - wanted).abs().max() / wanted.abs().max()) <= tolerance_of(kernel)[dtype]
    assert torch.equal(together, alone) == (dtype == torch.float32)
