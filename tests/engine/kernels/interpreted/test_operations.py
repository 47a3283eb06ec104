"""The fused operations against plain torch, rounding for rounding."""

import pytest
import torch
from attention_cases import make_batch, poisoned

from engine.forward import PagedAttention
from engine.kernels import int8_kv
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceAttention
from engine.kernels.triton.operations import TritonOperations
from engine.models.operations import RMSNorm, TorchOperations


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got, wanted, ulps=2):
    """Equal up to a few units in the last place: sums run in another order, and NumPy's functions are not torch's."""
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=ulps * torch.finfo(got.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [1, 64, 96, 1000])
def test_residual_and_norm(dtype, columns):
    x, delta = randn(5, columns, seed=1, dtype=dtype) * 3, randn(5, columns, seed=2, dtype=dtype)
    norm = RMSNorm(randn(columns, seed=3, dtype=dtype), 1e-5)
    for added in (None, delta):
        mine, plain = x.clone(), x.clone()
        same(TritonOperations().add_norm(mine, added, norm), TorchOperations().add_norm(plain, added, norm))
        assert torch.equal(mine, plain)
    assert TritonOperations().add_norm(x[:0], delta[:0], norm).shape == (0, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [1, 96, 1500])
def test_gate(dtype, columns):
    gate_up = randn(4, 2 * columns, seed=4, dtype=dtype) * 5
    same(TritonOperations().gate(gate_up), TorchOperations().gate(gate_up), ulps=4)


@pytest.mark.parametrize("memory", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 16), (6, 2, 80), (8, 1, 32)])
def test_rotation_and_write(memory, normed, shape):
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(5)
    batch = make_batch([(9, 20), (1, 30), (5, 5)], 7, 14, generator)
    qkv = randn(batch.num_tokens, heads + 2 * kv_heads, dim, seed=6)
    angles = randn(batch.num_tokens, dim // 2, seed=7) * 3
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
    norms = (RMSNorm(randn(dim, seed=8), 1e-5), RMSNorm(randn(dim, seed=9), 1e-6)) if normed else None
    queries, memories = [], []
    for operations in (TorchOperations(), TritonOperations()):
        kv = poisoned(memory, 14, 3, 2, kv_heads, 7, dim)
        paged = _Recording(ReferenceAttention(), kv, (AttentionSpec(heads, kv_heads, dim, 1.0),) * 3, batch)
        operations.attend(paged, 1, qkv.clone(), heads, rotation, norms)
        queries.append(paged.query)
        memories.append(kv)
    same(queries[1], queries[0], ulps=4)
    if memory == torch.int8:
        stored = [int8_kv.dequantize(kv) for kv in memories]
        assert torch.equal(stored[0].isnan(), stored[1].isnan())
        step = int8_kv.scales(memories[0]).nan_to_num().max().item()  # a last bit may move a code by one
        torch.testing.assert_close(stored[1], stored[0], rtol=0, atol=step * 1.01, equal_nan=True)
        differ = (int8_kv.codes(memories[0]) != int8_kv.codes(memories[1])).float().mean()
        assert differ < 1e-3
        if not normed:
            assert differ == 0
    else:
        eps = torch.finfo(memory).eps
        torch.testing.assert_close(memories[1], memories[0], rtol=4 * eps, atol=1e-6, equal_nan=True)
    assert torch.equal(
        memories[1][:, [0, 2]].isnan() if memory != torch.int8 else memories[1][:, [0, 2]] == -1,
        torch.ones_like(memories[1][:, [0, 2]], dtype=torch.bool),
    ), "another layer was written"


class _Recording(PagedAttention):
    """Keeps the queries."""

    query = None

    def attend(self, layer, q):
        self.query = q
        return super().attend(layer, q)
