"""Compiles Triton kernels for a GPU that is not there, exactly as the host code launches them, and reads what they take.

A driver that names a device and launches nothing takes the place of Triton's own. So the launch's arguments are specialised,
compiled down to the machine code of the GPU (ptxas comes with Triton) and kept, and outputs stay as they were.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """What one launch compiled to. registers a thread, shared: bytes a block, spilled: bytes a thread kept in local memory."""

    name: str
    registers: int
    shared: int
    spilled: int
    ptx: str


class _NoDevice:
    """A driver of a device that cannot launch."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


class Compiling:
    """As a context: launches compile for sm_`capability` only. `kernels`: what was compiled, in the order of launches."""

    def __init__(self, capability, monkeypatch, cache_dir):
        self.kernels = []
        self._resources = {}
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_dir))
        monkeypatch.setattr(triton.runtime.driver, "_active", _NoDevice(capability))
        monkeypatch.setattr(JITFunction, "__getitem__", lambda function, grid: self._launcher(function, grid))

    def _launcher(self, function, grid):
        def launch(*args, **settings):
            assert all(0 < size < limit for size, limit in zip(grid, (2**31, 2**16, 2**16), strict=False)), grid
            self.kernels.append(self._read(function.run(*args, grid=grid, warmup=True, **settings)))

        return launch

    def _read(self, kernel):
        if kernel.hash not in self._resources:
            path = Path(next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin")))
            command = [str(CUOBJDUMP), "--dump-resource-usage", str(path)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
            self._resources[kernel.hash] = Compiled(
                kernel.metadata.name, registers, kernel.metadata.shared, stack + local, kernel.asm["ptx"]
            )
        return self._resources[kernel.hash]
