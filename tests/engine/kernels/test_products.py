"""Every product kernel against float64: all formats and methods, odd numbers of rows and columns, on this machine and as a
lesser one would compute."""

import shutil

import pytest
import torch
from variants import load_with_amx

from engine.kernels.cpu.library import load_library
from engine.kernels.cpu.matrix import Format, Method, Slabs, has_method, multiply, pack, quantized_format
from engine.quantization.matrix import QuantizedMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")

ROWS = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 29, 33, 100, 250, 257)

# Relative error of a product, root mean square: what rounding the activations costs. FMA keeps them as they are.
BOUNDS = {
    Method.FMA: 2e-6,
    Method.HALF: 4e-3,
    Method.DOT_BF16: 4e-3,
    Method.AMX_BF16: 4e-3,
    Method.DOT_INT16: 3e-4,
    Method.DOT_INT8: 2e-2,
}


@pytest.fixture(scope="session")
def library(kernel_cache):
    return load_library(16, kernel_cache)


@pytest.fixture(scope="session")
def team(library):
    team = library.team(2)
    yield team
    team.close()


def random_weight(matrix_format, n, k, generator):
    """A weight that the format holds exactly, and the same in float64."""
    if matrix_format <= Format.FLOAT16:
        dtype = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}[matrix_format]
        weight = torch.randn((n, k), generator=generator).to(dtype)
        return weight, weight.double()
    bits = 4 if matrix_format is Format.CODES4_GROUPS else 8
    group = k if matrix_format is Format.CODES8 else 32
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand((n, k // group), generator=generator).half().float()
    minimum = (
        scale * -128.0 if matrix_format is Format.CODES8 else (torch.randn(scale.shape, generator=generator) * 8).half().float()
    )
    matrix = QuantizedMatrix(codes, scale, minimum, bits, group)
    assert quantized_format(matrix) is matrix_format
    wide = codes.double().view(n, -1, group) * scale.double()[..., None] + minimum.double()[..., None]
    return matrix, wide.view(n, k)


def check(library, team, matrix_format, method, n, k, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, exact = random_weight(matrix_format, n, k, generator)
    packed = pack(library, weight, matrix_format)
    x = torch.randn((rows, k), generator=generator)
    x[rows // 2] *= 1e4  # rows differ in size
    if rows > 2:
        x[rows // 3] = 0
    got = multiply(library, team, packed, x, method)
    wanted = x.double() @ exact.T
    assert got.shape == (rows, n)
    size = (x.double().square() @ exact.T.square()).sqrt()  # of the terms; sums may cancel
    error = ((got - wanted).abs() / size.clamp_min(1e-30)).square().mean(1).sqrt()
    bound = BOUNDS[method] * (3 if n == 1 else 1)  # one value, not the mean over a row
    assert error.max() < bound, (matrix_format.name, method.name, n, k, rows, error.max())
    if rows > 2:
        assert not got[rows // 3].any()


def methods(library):
    return [(f, m) for f in Format for m in Method if has_method(library, f, m)]


def test_products_are_as_exact_as_their_activations(library, team):
    assert {f for f, _ in methods(library)} == set(Format)
    for seed, (matrix_format, method) in enumerate(methods(library)):
        for rows in ROWS:
            check(library, team, matrix_format, method, 80, 96, rows, seed)
        check(library, team, matrix_format, method, 17, 32, 6, seed)
        check(library, team, matrix_format, method, 1, 160, 14, seed)
        check(library, team, matrix_format, method, 224, 1568, 25, seed)


@pytest.mark.parametrize("march", ["x86-64-v3", "skylake-avx512", "icelake-server"])
def test_lesser_machines_compute_the_same(kernel_cache, march):
    library = load_library(16, kernel_cache, march)
    team = library.team(2)
    for seed, (matrix_format, method) in enumerate(methods(library)):
        for rows in (1, 3, 8, 13, 100):
            check(library, team, matrix_format, method, 80, 96, rows, seed)
        check(library, team, matrix_format, method, 33, 1536, 5, seed)
    team.close()


def test_amx_computes_the_same(kernel_cache):
    library = load_with_amx(16, kernel_cache)
    team = library.team(2)
    assert has_method(library, Format.BFLOAT16, Method.AMX_BF16)
    for rows in (1, 5, 16, 17, 31, 32, 33, 70):
        check(library, team, Format.BFLOAT16, Method.AMX_BF16, 80, 96, rows, rows)
    check(library, team, Format.BFLOAT16, Method.AMX_BF16, 33, 1536, 5, 0)
    team.close()


def test_float32_rows_do_not_depend_on_their_neighbours(library, team):
    generator = torch.Generator().manual_seed(9)
    for matrix_format in (Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16):
        weight, _ = random_weight(matrix_format, 96, 576, generator)
        packed = pack(library, weight, matrix_format)
        x = torch.randn((260, 576), generator=generator)
        whole = multiply(library, team, packed, x, Method.FMA)
        for rows in ROWS:
            assert torch.equal(multiply(library, team, packed, x[:rows], Method.FMA), whole[:rows])


@pytest.mark.parametrize("matrix_format", list(Format))
def test_gate_and_up_alternate_in_a_paired_matrix(library, team, matrix_format):
    generator = torch.Generator().manual_seed(10)
    weight, exact = random_weight(matrix_format, 96, 64, generator)
    packed = pack(library, weight, matrix_format, paired=True)
    x = torch.randn((3, 64), generator=generator)
    got = multiply(library, team, packed, x, Method.FMA).view(3, 3, 2, 16)
    wanted = (x.double() @ exact.T).view(3, 2, 3, 16).transpose(1, 2)
    assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-3 * wanted.abs().max())


def test_what_cannot_be_multiplied_says_why(library, team):
    matrix = pack(library, torch.ones((4, 32)), Format.FLOAT32)
    with pytest.raises(ValueError, match="FLOAT32 is not multiplied by HALF"):
        multiply(library, team, matrix, torch.ones((1, 32)), Method.HALF)
    with pytest.raises(ValueError, match=r"float32 \[m, 32\]"):
        multiply(library, team, matrix, torch.ones((1, 31)), Method.FMA)
    with pytest.raises(ValueError, match="quantise it first"):
        pack(library, torch.ones((4, 32)), Format.CODES8)
    odd = QuantizedMatrix(torch.zeros((2, 96), dtype=torch.uint8), torch.ones((2, 2)), torch.zeros((2, 2)), 8, 48)
    with pytest.raises(ValueError, match="groups of 48"):
        quantized_format(odd)
    shifted = QuantizedMatrix(torch.zeros((2, 96), dtype=torch.uint8), torch.ones((2, 1)), torch.zeros((2, 1)), 8, 96)
    with pytest.raises(ValueError, match="symmetrical"):
        quantized_format(shifted)


def test_matrices_in_slabs_lie_apart_and_aligned():
    slabs = Slabs(4096)
    taken = [slabs.take(size) for size in (1, 64, 100, 3000, 5000, 10)]  # the fifth needs a slab of its own size
    for number, room in enumerate(taken):
        assert room.ctypes.data % 64 == 0
        assert not room.any()
        room[:] = number + 1
    assert [(room.min(), room.max(), room.size) for room in taken] == [
        (number + 1, number + 1, size) for number, size in enumerate((1, 64, 100, 3000, 5000, 10))
    ]
