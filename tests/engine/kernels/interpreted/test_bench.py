"""The benchmark's calls work: at a size that the interpreter can bear, on a CPU."""

import runpy
from pathlib import Path

import pytest
import torch

BENCH = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "bench_triton.py"))


@pytest.mark.parametrize("memory", [torch.float32, torch.int8])
def test_every_work_can_be_called(memory):
    sizes = BENCH["Sizes"](
        heads=4,
        kv_heads=2,
        dim=16,
        hidden=32,
        inner=48,
        vocab=100,
        decodes=((2, 40),),
        prefills=((20, 40),),
        rows=(3,),
        sampled=(2,),
    )
    names = []
    for work in BENCH["works"](sizes, memory, torch.device("cpu")):
        work.call()
        assert (work.bytes > 0) != (work.operations > 0), work.name
        names.append(work.name)
    assert len(names) == 1 + 1 + 3 + 4
