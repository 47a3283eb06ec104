"""The Triton attention kernel against float64: random batches, layouts and shapes, poisoned memory and outputs."""

import mmap

import pytest
import torch
from attention_cases import check_attention, exact, make_batch, poisoned
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.kernels import int8_kv
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceAttention
from engine.kernels.triton.attention import TritonAttention

# The interpreter's bfloat16 products are wrong; test_triton_compiles.py has bfloat16 at least compiled.
DTYPES = [torch.float32, torch.float16, torch.int8]
SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (6, 2, 80), (2, 1, 16), (14, 2, 64), (4, 2, 96), (2, 1, 256), (20, 1, 16)]

sequences = st.lists(
    st.integers(1, 300).flatmap(lambda context: st.tuples(st.integers(1, min(context, 90)), st.just(context))),
    min_size=1,
    max_size=3,
)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 1, 5, 100, 257]),
    block_size=st.sampled_from([16, 4, 7]),
    batch=sequences,
    seed=st.integers(0, 2**31),
)
@example((9, 3, 64), torch.float32, None, 16, [(1, 700), (1, 1), (40, 300), (1, 513), (7, 7)], 0)  # decode beside prefill
@example((8, 2, 64), torch.int8, None, 16, [(1, 600), (3, 600), (1, 257)], 1)
@example((4, 4, 32), torch.float32, 300, 4, [(1, 700), (5, 600), (60, 320)], 2)
@example((6, 2, 80), torch.float16, None, 7, [(1, 300), (20, 20)], 3)
def test_attention_equals_float64(shape, dtype, window, block_size, batch, seed):
    check_attention(TritonAttention(), shape, dtype, window, block_size, batch, seed)


def test_float16_queries_over_int8_memory_of_small_values():
    """A weight times a scale would be too small for float16: 1e-3 / 127 times some thousandths."""
    generator = torch.Generator().manual_seed(3)
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    batch = make_batch([(1, 500), (30, 200)], 16, 60, generator)
    whole = make_batch([(500, 500), (200, 200)], 16, 60, None, batch.block_tables)
    kv = poisoned(torch.int8, 60, 2, 2, 16, 32)
    k, v = torch.randn(2, 700, 2, 32, generator=generator)
    ReferenceAttention().write(kv, k, v * 1e-3, whole)
    q = torch.randn(31, 4, 32, generator=generator).half()
    wanted = exact(q, kv, spec, batch)
    got = TritonAttention().attend(q, kv, spec, batch)
    assert got.dtype == torch.float16
    assert (got.double() - wanted).abs().max() <= 2e-3 * wanted.abs().max()


def test_a_row_does_not_depend_on_its_neighbours():
    """Splits follow from a sequence's own context: the same bits alone and beside longer and shorter ones."""
    generator = torch.Generator().manual_seed(4)
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    together = make_batch([(1, 290), (1, 1000), (1, 3)], 16, 100, generator)
    kv = torch.randn(100, 2, 2, 16, 32, generator=generator)
    q = torch.randn(3, 4, 32, generator=generator)
    among = TritonAttention().attend(q, kv, spec, together)
    for row, context in enumerate(together.context_lens_list):
        alone = make_batch([(1, context)], 16, 100, None, together.block_tables[row : row + 1])
        assert torch.equal(TritonAttention().attend(q[row : row + 1], kv, spec, alone)[0], among[row])


def test_what_the_host_lists_say_is_only_a_bound():
    """A captured decode step is replayed with contexts that its lists do not know."""
    generator = torch.Generator().manual_seed(5)
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    batch = make_batch([(1, 40), (1, 600)], 16, 60, generator)
    bound = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "context_lens_list"},
        context_lens_list=(2000, 2000),
    )
    kv, q = torch.randn(60, 2, 2, 16, 32, generator=generator), torch.randn(2, 4, 32, generator=generator)
    assert torch.equal(TritonAttention().attend(q, kv, spec, bound), TritonAttention().attend(q, kv, spec, batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_memory_of_more_than_2_to_the_31_elements(dtype):
    """Blocks at the far end of memory that is mapped but hardly touched."""
    kv_heads, block_size, dim = 1, 16, 64
    width = dim + int8_kv.SCALE_BYTES if dtype == torch.int8 else dim
    num_blocks = 2**31 // (2 * kv_heads * block_size * width) + 3
    shape = (num_blocks, 2, kv_heads, block_size, width)
    count = num_blocks * 2 * kv_heads * block_size * width
    with mmap.mmap(-1, count * dtype.itemsize) as mapped:
        kv = torch.frombuffer(mapped, dtype=dtype).view(shape)
        generator = torch.Generator().manual_seed(6)
        io = torch.float32 if dtype == torch.int8 else dtype
        for new, context in ((1, 20), (40, 40)):
            tables = torch.tensor([[num_blocks - 1, 1, num_blocks - 2]], dtype=torch.int32)
            batch = make_batch([(new, context)], block_size, num_blocks, None, tables)
            k, v = torch.randn(2, context, kv_heads, dim, generator=generator).to(io)
            TritonAttention().write(kv, k, v, make_batch([(context, context)], block_size, num_blocks, None, tables))
            stored = (int8_kv.dequantize(kv[num_blocks - 1]) if dtype == torch.int8 else kv[num_blocks - 1]).float()
            torch.testing.assert_close(stored[0, 0], k[:16, 0].float(), rtol=0, atol=0.02)
            q = torch.randn(new, 4, dim, generator=generator).to(io)
            spec = AttentionSpec(4, kv_heads, dim, dim**-0.5)
            wanted = exact(q, kv, spec, batch)
            error = (TritonAttention().attend(q, kv, spec, batch).double() - wanted).abs().max() / wanted.abs().max()
            assert error <= 2e-3
        del kv, stored


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    magnitude=st.sampled_from([1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e34]),
    values=st.sampled_from(["normal", "ties", "outlier"]),
    io=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_int8_codes_and_scales_are_the_bits_of_the_other_kernels(magnitude, values, io, seed):
    generator = torch.Generator().manual_seed(seed)
    step = make_batch([(9, 20), (5, 5), (1, 3)], 7, 9, generator)
    rows = torch.randn(2, step.num_tokens, 3, 80, generator=generator)
    if values == "ties":  # with a largest magnitude of 127 every half is one
        rows = torch.randint(-253, 254, rows.shape, generator=generator) / 2
        rows[..., 0] = 127
    elif values == "outlier":
        rows[..., 3] *= 1000
    rows = (rows * magnitude).to(io)
    rows[:, 2] = 0
    rows[0, 4, 1, 7], rows[1, 5, 0, 3] = torch.inf, torch.nan
    reference, built = (poisoned(torch.int8, 9, 2, 2, 3, 7, 80)[:, 1] for _ in range(2))
    ReferenceAttention().write(reference, *rows, step)
    TritonAttention().write(built, *rows, step)
    assert torch.equal(int8_kv.codes(reference), int8_kv.codes(built))
    assert torch.equal(int8_kv.scales(reference).view(torch.int32).bool(), int8_kv.scales(built).view(torch.int32).bool())
    torch.testing.assert_close(int8_kv.scales(built), int8_kv.scales(reference), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("memory", "io"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_written_rows_are_rounded_to_the_memory(memory, io):
    generator = torch.Generator().manual_seed(8)
    step = make_batch([(9, 20), (1, 3)], 7, 9, generator)
    packed = torch.randn(step.num_tokens, 8, 80, generator=generator).to(io)
    k, v = packed[:, 2:5], packed[:, 5:]  # as they stand in the product of all three
    reference, built = (poisoned(memory, 9, 2, 3, 7, 80) for _ in range(2))
    ReferenceAttention().write(reference, k, v, step)
    TritonAttention().write(built, k, v, step)
    torch.testing.assert_close(built, reference, rtol=0, atol=0, equal_nan=True)


def test_what_it_does_not_take_is_said():
    step = make_batch([(1, 3)], 4, 3, torch.Generator().manual_seed(1))
    rows = torch.zeros(1, 1, 32)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        TritonAttention().write(torch.zeros(3, 2, 1, 4, 32, dtype=torch.float64), rows, rows, step)
    with pytest.raises(ValueError, match="keys have 32 dims, but KV memory 16"):
        TritonAttention().write(torch.zeros(3, 2, 1, 4, 16), rows, rows, step)
    with pytest.raises(ValueError, match="heads have 32 dims, but KV memory 16"):
        TritonAttention().attend(rows, torch.zeros(3, 2, 1, 4, 16), AttentionSpec(1, 1, 32, 1.0), step)
