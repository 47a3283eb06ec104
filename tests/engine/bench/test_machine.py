"""The probe: what it says of this machine holds together."""

import pytest
import torch

from engine.bench import machine
from engine.bench.machine import Machine, Read, measure_machine
from engine.kernels.cpu.library import KernelBuildError

MIB = 1 << 20


def check(measured, sizes):
    assert [read.size for read in measured.reads] == list(sizes)
    for read in measured.reads:
        assert read.bytes > 0
        assert read.bytes % read.size == 0
        assert read.bandwidth * read.seconds == pytest.approx(read.bytes)
        assert 1e8 < read.bandwidth < 1e13
    assert measured.rates["float32"] > 1e8
    assert all(rate > 0 for rate in measured.rates.values())
    assert measured.memory_bandwidth == measured.reads[-1].bandwidth


def test_the_native_probe(model_cache_dir):
    try:
        measured = measure_machine(1, model_cache_dir / "kernels", sizes=(MIB, 8 * MIB))
    except KernelBuildError as error:
        pytest.skip(str(error))
    if measured.origin != "C++ probe":
        pytest.skip(f"no C++ compiler here: {measured.origin}")
    check(measured, (MIB, 8 * MIB))


def test_more_reads_take_longer_and_two_threads_share_them(model_cache_dir):
    try:
        probe = machine._NativeProbe(2, model_cache_dir / "kernels")
    except KernelBuildError as error:
        pytest.skip(str(error))
    buffer = torch.ones(4 * MIB, dtype=torch.uint8)
    few, many = (min(probe.read(buffer, times) for _ in range(5)) for times in (4, 64))
    assert many > 4 * few  # sixteen times the bytes, and the threads' start once


def test_torch_stands_in_without_a_compiler(monkeypatch, tmp_path):
    def no_compiler(*_):
        raise KernelBuildError("no C++ compiler is found (g++ or c++)")

    monkeypatch.setattr(machine, "build_shared", no_compiler)
    threads = torch.get_num_threads()
    measured = measure_machine(1, tmp_path, sizes=(MIB,))
    check(measured, (MIB,))
    assert measured.origin == "torch operators, for want of the C++ probe: no C++ compiler is found (g++ or c++)"
    assert torch.get_num_threads() == threads


def test_sizes_beyond_the_memory_are_left_out(monkeypatch, model_cache_dir):
    monkeypatch.setattr(machine, "available_memory", lambda: 16 * MIB)
    measured = measure_machine(1, model_cache_dir / "kernels", sizes=(MIB, 4 * MIB, 64 * MIB))
    assert [read.size for read in measured.reads] == [MIB, 4 * MIB]


def test_of_two_measurements_the_better_figures_are_kept():
    first = Machine(2, (Read(8, 100, 1.0), Read(16, 50, 1.0)), {"float32": 5.0, "int8": 9.0}, "x")
    second = Machine(2, (Read(8, 90, 1.0), Read(16, 120, 2.0)), {"float32": 6.0, "int8": 8.0}, "x")
    assert first.better(second) == Machine(2, (Read(8, 100, 1.0), Read(16, 120, 2.0)), {"float32": 6.0, "int8": 9.0}, "x")
