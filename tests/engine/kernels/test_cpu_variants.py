"""The code that other processors run, as far as this one can run it, and AMX in software where there is none."""

import shutil

import pytest
from attention_cases import TOLERANCE, check_attention, tolerance_of
from variants import VARIANTS, load_variant

from engine.kernels.cpu.kernel import CpuAttention

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")

MIXED = [(150, 700), (1, 300), (3, 3), (40, 95)]  # new tokens, context


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_build_computes_attention(cache_dir, variant):
    library = load_variant(variant, 64, cache_dir)
    assert library.has_amx == (variant == "emulated-amx")
    team = library.team(2)
    kernel = CpuAttention(library, team)
    tolerance = tolerance_of(kernel)
    for dtype in TOLERANCE:
        for seed, (heads, kv_heads, window) in enumerate([(9, 3, None), (14, 2, 100)]):
            check_attention(kernel, (heads, kv_heads, 64), dtype, window, 16, MIXED, seed, tolerance=tolerance)
        check_attention(kernel, (4, 4, 64), dtype, None, 7, MIXED, 2, tolerance=tolerance, spread=4.0)
    team.close()
