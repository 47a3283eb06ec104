"""What this machine can: bytes read a second and matrix operations a second, measured here and now."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from engine.kernels.cpu.library import KernelBuildError, build_shared
from engine.memory import available_memory

FORMATS = ("float32", "bfloat16", "float16", "int8")
_MIB = 1 << 20
READ_SIZES = tuple(size * _MIB for size in (16, 64, 128, 256, 512, 1024))
"""Working sets that are read; the largest stands for memory, the smaller ones may stay in a cache."""

_SECONDS = 0.05
_TRIES = 5
_READ_GRAIN = 512


@dataclass(frozen=True, slots=True)
class Read:
    """`bytes` read in `seconds`, over and over from a working set of `size` bytes."""

    size: int
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of all `threads` together. `rates`: operations a second (a product and its addition are two) for each
    format that has an instruction. `origin`: what measured them. `reads`: smallest working set first."""

    threads: int
    reads: tuple[Read, ...]
    rates: dict[str, float]
    origin: str

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second from the largest working set."""
        return self.reads[-1].bandwidth

    def bandwidth(self, size: int) -> float:
        """Bytes a second for a step that reads `size` bytes and reads them again in the next: of the largest measured working
        set that is not larger, so that what a cache keeps of a model is not taken for a faster memory."""
        fitting = [read for read in self.reads if read.size <= size]
        return fitting[-1].bandwidth if fitting else self.reads[0].bandwidth

    def better(self, other: Machine) -> Machine:
        """The better of two measurements in everything: what disturbs one makes it slower, never faster."""
        reads = tuple(
            max(mine, theirs, key=lambda read: read.bandwidth) for mine, theirs in zip(self.reads, other.reads, strict=True)
        )
        names = [name for name in FORMATS if name in self.rates or name in other.rates]
        rates = {name: max(self.rates.get(name, 0.0), other.rates.get(name, 0.0)) for name in names}
        return Machine(self.threads, reads, rates, self.origin)


def measure_machine(threads: int, cache_dir: Path, sizes: tuple[int, ...] = READ_SIZES) -> Machine:
    """Takes a few seconds. The C++ probe (probe.cpp) is built into `cache_dir` at the first time; without a compiler torch's
    operators stand in, which reach less than the processor could. Working sets beyond a quarter of the memory that is
    available are left out."""
    limit = available_memory() // 4
    sizes = tuple(size for size in sizes if size <= limit) or sizes[:1]
    try:
        probe: _Probe = _NativeProbe(threads, cache_dir)
        origin = "C++ probe"
    except KernelBuildError as error:
        probe = _TorchProbe(threads)
        origin = f"torch operators, for want of the C++ probe: {error}"
    grain = _READ_GRAIN * threads
    buffer = torch.ones(max(sizes) // grain * grain, dtype=torch.uint8)  # written: untouched pages would all be one page
    reads = tuple(_best_read(probe, buffer[: size // grain * grain]) for size in sizes)
    del buffer
    rates = {name: rate for name in FORMATS if (rate := probe.rate(name)) > 0}
    return Machine(threads, reads, rates, origin)


def _best_read(probe: _Probe, buffer: torch.Tensor) -> Read:
    size = buffer.numel()
    times = 1
    while (seconds := probe.read(buffer, times)) < _SECONDS:
        times = max(times + 1, int(times * _SECONDS / max(seconds, 1e-6) * 1.2))
    return Read(size, size * times, min(seconds, *(probe.read(buffer, times) for _ in range(_TRIES - 1))))


class _Probe(Protocol):
    """Interface of the two probes."""

    def read(self, buffer: torch.Tensor, times: int) -> float:
        """Seconds that reading all of `buffer` takes, `times` times over."""

    def rate(self, name: str) -> float:
        """Operations a second in a format, the best of a few tries; 0 where there is no instruction for it."""


class _NativeProbe:
    _KINDS: ClassVar = {"float32": (0,), "bfloat16": (1, 4), "float16": (2,), "int8": (3, 5)}

    def __init__(self, threads: int, cache_dir: Path) -> None:
        source = Path(__file__).parent / "probe.cpp"
        path = build_shared("probe", source, (source,), cache_dir)
        try:
            dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"the built probe at {path} cannot be loaded: {error}") from error
        self._threads = threads
        self._read = dll.turnkeep_probe_read
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
        self._read.restype = ctypes.c_double
        self._rate = dll.turnkeep_probe_rate
        self._rate.argtypes, self._rate.restype = (ctypes.c_int, ctypes.c_int, ctypes.c_int64), ctypes.c_double

    def read(self, buffer: torch.Tensor, times: int) -> float:
        return float(self._read(buffer.data_ptr(), buffer.numel(), self._threads, times))

    def rate(self, name: str) -> float:
        return max(self._best(kind) for kind in self._KINDS[name])

    def _best(self, kind: int) -> float:
        rounds = 1000
        while True:
            began = time.perf_counter()
            rate = float(self._rate(kind, self._threads, rounds))
            seconds = time.perf_counter() - began
            if rate == 0:
                return 0.0
            if seconds >= _SECONDS / 2:
                break
            rounds *= 4
        return max(rate, *(float(self._rate(kind, self._threads, rounds)) for _ in range(_TRIES - 1)))


class _TorchProbe:
    """With products of square matrices that stay in a cache, and the sum of a buffer. Sets torch's threads for as long."""

    _SIDE = 768

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def read(self, buffer: torch.Tensor, times: int) -> float:
        words = buffer.view(torch.int64)
        return self._seconds(lambda: words.sum(), times)

    def rate(self, name: str) -> float:
        shape = (self._SIDE, self._SIDE)
        if name == "int8":
            left = torch.ones(shape, dtype=torch.int8)
            product: Callable[[], object] = lambda: torch._int_mm(left, left)  # noqa: E731
        else:
            wide = torch.ones(shape, dtype=getattr(torch, name))
            product = lambda: wide @ wide  # noqa: E731
        try:
            self._seconds(product, 1)  # the first one is slower
        except RuntimeError:
            return 0.0  # this build of torch has no such product
        return 2 * self._SIDE**3 / min(self._seconds(product, 1) for _ in range(_TRIES * 4))

    def _seconds(self, call: Callable[[], object], times: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            began = time.perf_counter()
            for _ in range(times):
                call()
            return time.perf_counter() - began
        finally:
            torch.set_num_threads(before)
