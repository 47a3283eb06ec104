"""Builds of the kernels for other processors than this one, as far as this one runs them."""

from pathlib import Path

import pytest

from engine.kernels.cpu.library import load_library

NO_AMX = "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8"

# What the compiler is told, and which of /proc/cpuinfo's flags that code needs.
VARIANTS = {
    "avx2": ("x86-64-v3", {"avx2", "fma", "f16c"}),
    "avx512": ("skylake-avx512", {"avx512bw", "avx512dq", "avx512vl"}),
    "avx512-vnni": ("icelake-server", {"avx512_vnni", "avx512vbmi", "gfni", "vaes"}),
    "avx512-fp16": (f"sapphirerapids {NO_AMX}", {"avx512_fp16", "avx512_bf16", "avx_vnni"}),
    "emulated-amx": (f"native {NO_AMX} -DTURNKEEP_EMULATE_AMX", {"avx512bw", "avx512dq", "avx512vl"}),
}


def processor_flags():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def load_variant(name, head_dim, cache_dir):
    """The library of a variant; skips the test where this processor cannot run it."""
    march, needed = VARIANTS[name]
    missing = needed - processor_flags()
    if missing:
        pytest.skip(f"this processor cannot run the {name} build: it has no {', '.join(sorted(missing))}")
    return load_library(head_dim, cache_dir, march)


def load_with_amx(head_dim, cache_dir):
    """A library whose AMX code runs: on AMX where there is, emulated elsewhere."""
    native = load_library(head_dim, cache_dir)
    return native if native.has_amx else load_variant("emulated-amx", head_dim, cache_dir)
