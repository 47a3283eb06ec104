"""int8 and int4: codes in range, errors within their bounds for every group, and what is exact stays so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8

ULP = 2.0**-22  # of the sum scale * code + minimum, in units of its larger term


@st.composite
def matrices(draw, group):
    """Normal and heavy-tailed weights of very different sizes per group, some groups constant or zero, some dtypes."""
    rows, groups = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    wide = torch.randn(rows, groups, group, generator=generator)
    if draw(st.booleans()):
        wide = wide**3
    wide *= 10.0 ** torch.randint(-6, 2, (rows, groups, 1), generator=generator)
    wide += torch.randint(-3, 4, (rows, groups, 1), generator=generator) * wide.abs().amax(-1, keepdim=True)
    kind = torch.randint(0, 6, (rows, groups, 1), generator=generator)
    wide = torch.where(kind == 0, 0.0, torch.where(kind == 1, wide[..., :1], wide))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return wide.view(rows, groups * group).to(dtype)


def groups_of(values, matrix):
    return values.float().view(matrix.shape[0], -1, matrix.group)


@settings(max_examples=60, deadline=None)
@given(matrices(16), st.booleans())
def test_int8_is_within_half_a_step_of_every_weight(weight, grouped):
    matrix = quantize_int8(weight, 16 if grouped else None)
    assert (matrix.bits, matrix.group, matrix.codes.dtype) == (8, 16 if grouped else weight.shape[1], torch.uint8)
    assert matrix.codes.min() >= 1
    assert torch.equal(matrix.minimum, -128 * matrix.scale)
    wide = groups_of(weight, matrix)
    largest = wide.abs().amax(-1)
    torch.testing.assert_close(matrix.scale, largest / 127, rtol=1e-6, atol=0)
    error = (groups_of(matrix.dequantize(), matrix) - wide).abs()
    assert (error <= (0.5 * matrix.scale + 256 * matrix.scale * ULP)[..., None]).all()


@settings(max_examples=100, deadline=None)
@given(matrices(32))
def test_int4_is_no_worse_than_an_even_grid_over_each_group(weight):
    matrix = quantize_int4(weight)
    assert (matrix.bits, matrix.group, matrix.codes.dtype) == (4, 32, torch.uint8)
    assert matrix.codes.max() <= 15
    assert (matrix.scale >= 0).all()
    wide = groups_of(weight, matrix).double()
    low, high = wide.aminmax(dim=-1)
    step = ((high - low) / 15)[..., None]
    even = torch.where(step > 0, (wide - low[..., None]) / torch.where(step > 0, step, 1), 0).round() * step + low[..., None]
    rounding = (wide.abs().amax(-1) * ULP) ** 2 * 32
    got = (groups_of(matrix.dequantize(), matrix).double() - wide).square().sum(-1)
    assert (got <= (even - wide).square().sum(-1) * 1.0001 + rounding).all()
    # And so no weight is off by more than the whole group is on the even grid.
    assert (got.sqrt() <= 0.5 * step[..., 0] * 32**0.5 * 1.0001 + rounding.sqrt()).all()


def test_int4_beats_the_even_grid_on_weights_of_a_layer():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    wide = weight.view(64, 16, 32)
    low, high = wide.aminmax(dim=-1, keepdim=True)
    even = ((wide - low) / (high - low) * 15).round() * (high - low) / 15 + low
    found = quantize_int4(weight).dequantize().view_as(wide)
    assert (found - wide).square().mean() < 0.9 * (even - wide).square().mean()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(-20, 5), st.integers(1, 31))
def test_int4_of_a_grid_is_exact(seed, exponent, odd):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (5, 3, 32), generator=generator)
    codes[..., 7], codes[..., 20] = 0, 15
    scale = odd * 2.0**exponent
    minimum = scale * torch.randint(-15, 16, (5, 3, 1), generator=generator)
    weight = (codes * scale + minimum).view(5, 96)
    matrix = quantize_int4(weight)
    assert torch.equal(matrix.dequantize(), weight)
    assert torch.equal(matrix.codes, codes.view(5, 96).to(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(-20, 5), st.integers(1, 31))
def test_int8_of_a_grid_is_exact(seed, exponent, odd):
    generator = torch.Generator().manual_seed(seed)
    signed = torch.randint(-127, 128, (5, 70), generator=generator)
    signed[:, 3] = -127
    weight = signed * (odd * 2.0**exponent)
    matrix = quantize_int8(weight)
    assert torch.equal(matrix.dequantize(), weight)
    assert torch.equal(matrix.codes.int() - 128, signed.int())


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-7, 3e4])
def test_constant_groups_are_exact(value):
    weight = torch.full((3, 64), value)
    assert torch.equal(quantize_int4(weight).dequantize(), weight)
    error = quantize_int8(weight).dequantize() - weight
    assert error.abs().max() <= abs(value) * 1e-6


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, lambda weight: quantize_int8(weight, 32)])
def test_the_codes_of_a_dequantised_matrix_are_the_same(quantize):
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(7))
    once = quantize(weight)
    again = quantize(once.dequantize())
    error = (again.dequantize() - once.dequantize()).norm() / once.dequantize().norm()
    assert error < 0.02 if once.bits == 4 else error < 1e-6


def test_every_chunk_is_quantised_alike(monkeypatch):
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(5))
    whole4, whole8 = quantize_int4(weight), quantize_int8(weight)
    monkeypatch.setattr("engine.quantization.int4._CHUNK", 200)
    monkeypatch.setattr("engine.quantization.int8._CHUNK", 200)
    for whole, part in ((whole4, quantize_int4(weight)), (whole8, quantize_int8(weight))):
        assert torch.equal(whole.codes, part.codes)
        # But for the order in which a sum over a group adds up.
        torch.testing.assert_close(whole.scale, part.scale, rtol=1e-6, atol=0)
        torch.testing.assert_close(whole.minimum, part.minimum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_what_is_no_number_is_refused(quantize, bad):
    weight = torch.randn(4, 64)
    weight[2, 9] = bad
    with pytest.raises(ValueError, match="no finite numbers"):
        quantize(weight)


def test_a_group_must_divide_the_inputs():
    for quantize in (lambda weight: quantize_int8(weight, 32), quantize_int4):
        with pytest.raises(ValueError, match="32 does not divide 40"):
            quantize(torch.randn(4, 40))
