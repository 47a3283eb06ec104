"""The reference attention against a loop over tokens in float64, on random ragged batches over poisoned memory."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.kernels import reference
from engine.kernels.interface import AttentionSpec, StepBatch
from engine.kernels.reference import ReferenceAttention

torch.set_num_threads(1)


def build(sequences, block_size, spec, dtype, seed, num_layers=2):
    """sequences: (context before, new tokens). Returns a batch, poisoned KV with the earlier context in it, q, k, v and, per
    sequence, all of its keys and values."""
    generator = torch.Generator().manual_seed(seed)
    tables, total = [], 0
    for before, new in sequences:
        blocks = -(-(before + new) // block_size)
        tables.append(list(range(total, total + blocks)))
        total += blocks
    order = torch.randperm(total + 3, generator=generator).tolist()
    tables = [[order[b] for b in table] for table in tables]
    kv = torch.full((total + 3, num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim), float("nan"), dtype=dtype)
    layer = kv[:, 1]
    keys, values, slots, positions, starts = [], [], [], [], [0]
    for (before, new), table in zip(sequences, tables, strict=True):
        k = torch.randn(before + new, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
        v = torch.randn(before + new, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
        for position in range(before):
            block, offset = table[position // block_size], position % block_size
            layer[block, 0, :, offset], layer[block, 1, :, offset] = k[position], v[position]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(before, before + new)]
        positions += range(before, before + new)
        starts.append(starts[-1] + new)
        keys.append(k)
        values.append(v)
    width = max(map(len, tables))
    contexts = tuple(before + new for before, new in sequences)
    batch = StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        query_start_list=tuple(starts),
        context_lens_list=contexts,
    )
    q = torch.randn(starts[-1], spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    new_k = torch.cat([k[before:] for k, (before, _) in zip(keys, sequences, strict=True)])
    new_v = torch.cat([v[before:] for v, (before, _) in zip(values, sequences, strict=True)])
    return batch, kv, layer, q, new_k, new_v, keys, values


def naive(q, keys, values, sequences, spec):
    rows = []
    group = spec.num_heads // spec.num_kv_heads
    start = 0
    for (before, new), k, v in zip(sequences, keys, values, strict=True):
        for r in range(new):
            position = before + r
            low = 0 if spec.window is None else max(0, position - spec.window + 1)
            heads = []
            for head in range(spec.num_heads):
                kk = k[low : position + 1, head // group].double()
                scores = (kk @ q[start + r, head].double()) * spec.scale
                heads.append(torch.softmax(scores, 0) @ v[low : position + 1, head // group].double())
            rows.append(torch.stack(heads))
        start += new
    return torch.stack(rows)


def check(sequences, block_size, spec, dtype, seed, tolerance):
    batch, kv, layer, q, k, v, keys, values = build(sequences, block_size, spec, dtype, seed)
    untouched = kv[:, 0].clone()
    kernel = ReferenceAttention()
    kernel.write(layer, k, v, batch)
    got = kernel.attend(q, layer, spec, batch)
    expected = naive(q, keys, values, sequences, spec)
    assert got.shape == q.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv[:, 0], untouched, equal_nan=True)


sequence = st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 30)))


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    dim=st.sampled_from([8, 20]),
    window=st.sampled_from([None, 1, 5, 16]),
    tile=st.sampled_from([50, 1 << 22]),
    padded=st.sampled_from([0, 12, 384]),
    seed=st.integers(0, 2**16),
)
def test_random_batches_match_the_definition(sequences, block_size, heads, dim, window, tile, padded, seed):
    spec = AttentionSpec(heads[0], heads[1], dim, dim**-0.5, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MASK_ELEMENTS", tile)
        patch.setattr(reference, "PADDED_DECODE_TOKENS", padded)
        check(sequences, block_size, spec, torch.float32, seed, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    spec = AttentionSpec(6, 2, 16, 0.3, None)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-12}[dtype]
    check([(0, 20), (33, 1), (7, 9), (2, 1)], 16, spec, dtype, 0, tolerance)


def test_a_new_batch_is_not_served_from_the_plan_of_the_last_one():
    spec = AttentionSpec(2, 1, 8, 0.35, None)
    kernel = ReferenceAttention()
    for seed, sequences in enumerate([[(0, 5)], [(9, 1), (3, 1)], [(4, 3)]]):
        batch, _, layer, q, k, v, keys, values = build(sequences, 4, spec, torch.float32, seed)
        kernel.write(layer, k, v, batch)
        got = kernel.attend(q, layer, spec, batch)
        torch.testing.assert_close(got.double(), naive(q, keys, values, sequences, spec), atol=2e-5, rtol=2e-5)
