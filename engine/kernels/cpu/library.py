"""Builds the C++ kernels with the machine's compiler, once per (source, compiler, processor, head dim), and loads them.

A plain shared library called through ctypes, not a torch extension: it needs no torch headers, so that a build takes seconds
instead of a minute, and stays loadable across torch versions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fvisibility=hidden")
NATIVE = "native"
BUILD_TIMEOUT = 300.0
_DIGEST_BYTES = 32


class KernelBuildError(Exception):
    """The kernels cannot be had on this machine; the message says why, in one sentence."""


_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class AttentionArgs(ctypes.Structure):
    """Mirrors AttentionArgs of kv_rows.h."""

    _fields_ = (
        *((name, _pointer) for name in ("q", "kv", "out", "query_start", "context_lens", "block_tables")),
        *((name, _int64) for name in ("q_token", "q_head", "kv_block", "kv_side", "kv_head", "kv_token")),
        *((name, _int64) for name in ("out_token", "out_head", "table_stride")),
        ("team", _pointer),
        *(
            (name, _int32)
            for name in ("num_sequences", "num_heads", "num_kv_heads", "head_dim", "block_size", "window", "dtype")
        ),
        ("scale", ctypes.c_float),
    )


class WriteArgs(ctypes.Structure):
    """Mirrors WriteArgs of kv_rows.h."""

    _fields_ = (
        *((name, _pointer) for name in ("kv", "k", "v", "slots")),
        *((name, _int64) for name in ("kv_block", "kv_side", "kv_head", "kv_token")),
        *((name, _int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, _int64) for name in ("tokens", "kv_heads", "dim", "block_size", "size")),
        ("dtype", _int32),
    )


class Team:
    """Threads that kernels run on (team.h). One call at a time uses them; others wait for it."""

    def __init__(self, dll: ctypes.CDLL, threads: int) -> None:
        new, delete = dll.turnkeep_team_new, dll.turnkeep_team_delete
        new.argtypes, new.restype = (ctypes.c_int,), _pointer
        delete.argtypes, delete.restype = (_pointer,), None
        self.threads = threads
        self.handle = ctypes.c_void_p(new(threads))
        self._finalizer = weakref.finalize(self, delete, self.handle)
        # When the interpreter ends, a thread may still be computing on the team: the threads then end with the process.
        self._finalizer.atexit = False

    def close(self) -> None:
        """Ends the threads; idempotent. No call may be running or follow."""
        self._finalizer()


class Library:
    """The loaded kernels for one head dim."""

    def __init__(self, path: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"the built kernels at {path} cannot be loaded: {error}") from error
        self.path = path
        self._attention = self._dll.turnkeep_attention
        self._attention.argtypes = (ctypes.POINTER(AttentionArgs),)
        self._attention.restype = ctypes.c_int
        self._write = self._dll.turnkeep_write
        self._write.argtypes, self._write.restype = (ctypes.POINTER(WriteArgs),), ctypes.c_int
        self._matrix_bytes = self._dll.turnkeep_matrix_bytes
        self._matrix_bytes.argtypes, self._matrix_bytes.restype = (_int64, _int64, _int64), _int64
        self._pack_matrix = self._dll.turnkeep_pack_matrix
        self._pack_matrix.argtypes, self._pack_matrix.restype = (_pointer,), None
        self._has_method = self._dll.turnkeep_has_method
        self._has_method.argtypes, self._has_method.restype = (_int64, _int32), ctypes.c_int
        self._multiply = self._dll.turnkeep_multiply
        self._multiply.argtypes, self._multiply.restype = (_pointer,), None
        self._sample = self._dll.turnkeep_sample
        self._sample.argtypes, self._sample.restype = (_pointer,), None
        self._report = self._dll.turnkeep_report
        self._report.argtypes, self._report.restype = (_pointer,), None
        self._forward = self._dll.turnkeep_forward
        self._forward.argtypes, self._forward.restype = (_pointer,), ctypes.c_int
        self.has_half_products = bool(self._dll.turnkeep_half_products())
        self.has_amx = bool(self._dll.turnkeep_init())

    def team(self, threads: int) -> Team:
        """A new team of `threads` threads, the calling one among them."""
        return Team(self._dll, threads)

    def write(self, args: WriteArgs) -> int:
        """Stores one step's keys and values. 0 on success."""
        return int(self._write(args))

    def matrix_bytes(self, matrix_format: int, rows: int, columns: int) -> int:
        """Bytes that a packed matrix takes (matrix.h)."""
        return int(self._matrix_bytes(matrix_format, rows, columns))

    def pack_matrix(self, args: ctypes.Structure) -> None:
        """Packs a matrix (PackArgs of matrix.h)."""
        self._pack_matrix(ctypes.byref(args))

    def has_method(self, matrix_format: int, method: int) -> bool:
        """Whether this build on this machine multiplies a format by a method (product.h)."""
        return bool(self._has_method(matrix_format, method))

    def multiply(self, args: ctypes.Structure) -> None:
        """One product (MultiplyArgs of product.h); the GIL is released meanwhile."""
        self._multiply(ctypes.byref(args))

    def forward(self, args: ctypes.Structure) -> int:
        """Runs one forward pass (ForwardArgs of decoder.h); the GIL is released meanwhile. 0 on success."""
        return int(self._forward(ctypes.byref(args)))

    def sample(self, args: ctypes.Structure) -> None:
        """Chooses tokens (SampleArgs of sampling.h); the GIL is released meanwhile."""
        self._sample(ctypes.byref(args))

    def report(self, args: ctypes.Structure) -> None:
        """Computes log-probabilities (ReportArgs of sampling.h); the GIL is released meanwhile."""
        self._report(ctypes.byref(args))

    def attention(self, args: AttentionArgs) -> int:
        """Runs one attention call; the GIL is released meanwhile. 0 on success."""
        return int(self._attention(args))


@functools.cache
def _compiler() -> str:
    for name in ("g++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise KernelBuildError("no C++ compiler is found (g++ or c++)")


def _processor() -> str:
    """What -march=native depends on: the processor's name and its feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    first: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in wanted:
            first.setdefault(key.strip(), value.strip())
    return repr(sorted(first.items()))


def _flags(march: str) -> tuple[str, ...]:
    return (*FLAGS, *(f"-march={word}" if index == 0 else word for index, word in enumerate(march.split())))


def _key(compiler: str, files: Sequence[Path], defines: Sequence[str], march: str) -> str:
    digest = hashlib.sha256()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the C++ compiler {compiler} cannot be run: {error}") from error
    for part in (version, _processor(), " ".join(_flags(march)), " ".join(defines)):
        digest.update(part.encode() + b"\x00")
    for file in files:
        digest.update(file.read_bytes() + b"\x00")
    return digest.hexdigest()[:24]


def load_library(head_dim: int, cache_dir: Path, march: str = NATIVE) -> Library:
    """The kernels for `head_dim` (a multiple of 16 up to 256), built into `cache_dir` when they are not there yet.

    `march`: what the compiler is told of the processor, the value of -march and whatever options follow it after spaces. Other
    than native is for tests: it builds the code of lesser machines, which this one then runs. Raises KernelBuildError.
    """
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise KernelBuildError(f"head_dim {head_dim} is no multiple of 16 between 16 and 256")
    here = Path(__file__).parent
    files = sorted(here.glob("*.[hc]*"))
    return Library(build_shared("kernels", here / "library.cpp", files, cache_dir, (f"-DTURNKEEP_HEAD_DIM={head_dim}",), march))


def build_shared(
    stem: str, source: Path, files: Sequence[Path], cache_dir: Path, defines: Sequence[str] = (), march: str = NATIVE
) -> Path:
    """The shared library of `source`, which depends on `files`, built into `cache_dir` when it is not there yet.

    Two processes may build at once: each builds under a name of its own and renames. A file that is not as it was built (the
    disk was full, the power failed, somebody copied half of it) is built again. Raises KernelBuildError.
    """
    compiler = _compiler()
    target = cache_dir / f"{stem}-{_key(compiler, files, defines, march)}.so"
    if not _is_whole(target):
        _build(compiler, source, defines, march, target)
    return target


def _is_whole(target: Path) -> bool:
    """Whether `target` is there and ends with the digest of what precedes it. Loading a cut file would be a bus error."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST_BYTES and hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _seal(path: Path) -> None:
    """Appends the digest, which a loader ignores, and sees to it that all of it is on the disk."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _build(compiler: str, source: Path, defines: Sequence[str], march: str, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so.part")
        os.close(handle)
    except OSError as error:
        raise KernelBuildError(f"the kernel cache {target.parent} cannot be written: {error}") from error
    part = Path(name)
    command = [compiler, *_flags(march), *defines, str(source), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise KernelBuildError(f"{compiler} could not build the kernels: {last[0]}")
        _seal(part)
        part.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{compiler} could not build the kernels: {error}") from error
    finally:
        part.unlink(missing_ok=True)
