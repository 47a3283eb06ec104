"""The attention kernel against what this machine can do: prefill in FLOP/s, decode in bytes of KV a second.

    python tests/benchmarks/bench_attention.py [--threads 2] [--march "x86-64-v3"] [--only prefill|decode]

Prefill: a prompt computed in chunks over its cached prefix. FLOP are those of the products that a causal mask leaves, two
products a layer. Beside them stand the machine's rates of fused multiply-adds in float32 and, where it has them, float16,
measured by loops that do nothing else. Decode: one new token a sequence; bytes are the keys and values read. Beside them: the
bandwidth of reading memory. Every layer has KV memory of its own, so that no layer finds its keys in the cache because another
left them there.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import load_library
from engine.kernels.int8_kv import SCALE_BYTES
from engine.kernels.interface import AttentionSpec, StepBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
BLOCK = 16

RATES = r"""
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>
template <class V> static __attribute__((noinline)) void multiply_add(const V* from, V* to, int64_t times) {
    V x[COUNT];
    const V a = from[0], b = from[1];
#pragma GCC unroll 24
    for (int j = 0; j < COUNT; j++) x[j] = from[2 + j];
    for (int64_t i = 0; i < times; i++) {
#pragma GCC unroll 24
        for (int j = 0; j < COUNT; j++) x[j] = x[j] * a + b;
    }
#pragma GCC unroll 24
    for (int j = 0; j < COUNT; j++) to[j] = x[j];
}
template <class V, class S> static double rate(int threads, int lanes) {
    constexpr int64_t kTimes = 4000000;
    std::vector<double> took(threads);
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++) team.emplace_back([&, t] {
        V from[2 + COUNT], to[COUNT];
        for (auto& v : from)
            for (int i = 0; i < lanes; i++) v[i] = S(0.5f);
        took[t] = 1e9;
        for (int rep = 0; rep < 3; rep++) {
            const auto begin = std::chrono::steady_clock::now();
            multiply_add(from, to, kTimes);
            const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            if (s < took[t]) took[t] = s;
        }
    });
    double sum = 0;
    for (int t = 0; t < threads; t++) { team[t].join(); sum += double(kTimes) * COUNT * lanes * 2 / took[t]; }
    return sum;
}
typedef float F32 __attribute__((vector_size(WIDTH)));
extern "C" double rate_float32(int threads) { return rate<F32, float>(threads, WIDTH / 4); }
#ifdef __AVX512FP16__
typedef _Float16 F16 __attribute__((vector_size(WIDTH)));
extern "C" double rate_float16(int threads) { return rate<F16, _Float16>(threads, WIDTH / 2); }
#else
extern "C" double rate_float16(int) { return 0; }
#endif
extern "C" double rate_memory(int threads) {
    const size_t count = size_t(1) << 26;  // 512 MiB a thread
    std::vector<double> took(threads);
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++) team.emplace_back([&, t] {
        std::vector<uint64_t> data(count, t);
        double best = 1e9;
        for (int rep = 0; rep < 3; rep++) {
            const auto begin = std::chrono::steady_clock::now();
            uint64_t sum = 0;
            for (size_t i = 0; i < count; i++) sum += data[i];
            asm volatile("" : "+r"(sum));
            const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            if (s < best) best = s;
        }
        took[t] = best;
    });
    double sum = 0;
    for (int t = 0; t < threads; t++) { team[t].join(); sum += double(count) * 8 / took[t]; }
    return sum;
}
"""


def machine_rates(threads: int) -> tuple[float, float, float]:
    """FMA FLOP/s in float32 and in float16 (0 without), bytes/s read from memory."""
    flags = Path("/proc/cpuinfo").read_text()
    width = 64 if "avx512f" in flags else 32
    count = 24 if width == 64 else 12  # sums that fit the registers and hide the latency
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "rates.cpp", Path(folder) / "rates.so"
        source.write_text(RATES)
        command = [
            "g++",
            "-O3",
            "-march=native",
            "-std=c++17",
            "-fPIC",
            "-shared",
            "-pthread",
            f"-DWIDTH={width}",
            f"-DCOUNT={count}",
        ]
        subprocess.run([*command, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
        for name in ("rate_float32", "rate_float16", "rate_memory"):
            getattr(library, name).restype = ctypes.c_double
        return library.rate_float32(threads), library.rate_float16(threads), library.rate_memory(threads)


def batch_of(spans: list[tuple[int, int]], shared: int = 0) -> StepBatch:
    """spans: (new tokens, context) of sequences; the first `shared` blocks are the same ones for all of them."""
    starts, positions, slots, tables, free = [0], [], [], [], shared
    for new, context in spans:
        own = -(-context // BLOCK) - shared
        table = list(range(shared)) + list(range(free, free + own))
        free += own
        tables.append(table)
        span = range(context - new, context)
        positions += span
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in span]
        starts.append(starts[-1] + new)
    width = max(len(table) for table in tables)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        query_start_list=tuple(starts),
        context_lens_list=tuple(context for _, context in spans),
    )


class Memory:
    """KV memory of `layers` layers, filled with random keys and values."""

    def __init__(self, kernel: CpuAttention, args: argparse.Namespace, dtype: torch.dtype, blocks: int, layers: int) -> None:
        width = args.dim + SCALE_BYTES if dtype == torch.int8 else args.dim
        self.kv = torch.zeros((blocks, layers, 2, args.kv_heads, BLOCK, width), dtype=dtype)
        self.io = torch.float32 if dtype == torch.int8 else dtype
        everything = batch_of([(blocks * BLOCK, blocks * BLOCK)])
        for layer in range(layers):
            k, v = torch.randn(2, blocks * BLOCK, args.kv_heads, args.dim).to(self.io)
            kernel.write(self.kv[:, layer], k, v, everything)


def timed(call, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def prefill(kernel, args, dtype, rates) -> None:
    length, chunk = args.length, args.chunk
    memory = Memory(kernel, args, dtype, -(-length // BLOCK), 2)
    spec = AttentionSpec(args.heads, args.kv_heads, args.dim, args.dim**-0.5)
    steps = [batch_of([(min(chunk, length - begin), min(begin + chunk, length))]) for begin in range(0, length, chunk)]
    queries = [torch.randn(step.num_tokens, args.heads, args.dim).to(memory.io) for step in steps]

    def run() -> None:
        for step, q in zip(steps, queries, strict=True):
            for layer in range(2):
                kernel.attend(q, memory.kv[:, layer], spec, step)

    seconds = timed(run, args.repeats) / 2  # a layer
    flop = 4 * args.heads * args.dim * length * (length + 1) / 2
    rate = flop / seconds
    print(
        f"prefill {length} tokens in chunks of {chunk}, {kv_name(dtype)} KV: {seconds * args.layers:.2f} s "
        f"for {args.layers} layers, {rate / 1e9:.0f} GFLOP/s = {rate / rates[0]:.0%} of float32 FMA"
        + (f", {rate / rates[1]:.0%} of float16 FMA" if rates[1] else "")
    )


def decode(kernel, args, dtype, rates, sequences, context, shared=0) -> None:
    layers = 30
    blocks = shared + sequences * (-(-context // BLOCK) - shared)
    memory = Memory(kernel, args, dtype, blocks, layers)
    spec = AttentionSpec(args.heads, args.kv_heads, args.dim, args.dim**-0.5)
    step = batch_of([(1, context)] * sequences, shared)
    q = torch.randn(sequences, args.heads, args.dim).to(memory.io)

    def run() -> None:
        for layer in range(layers):
            kernel.attend(q, memory.kv[:, layer], spec, step)

    seconds = timed(run, args.repeats * 3)
    kv_bytes = sequences * context * layers * memory.kv[0, 0].nbytes / BLOCK
    print(
        f"decode {sequences} x {context} tokens{f', {shared * BLOCK} of them shared' if shared else ''}, {kv_name(dtype)} KV: "
        f"{seconds * 1e3:.1f} ms for {layers} layers, {kv_bytes / seconds / 1e9:.1f} GB/s of KV = "
        f"{kv_bytes / seconds / rates[2]:.0%} of memory bandwidth"
    )


def kv_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--march", default="native", help="what the compiler is told, as load_library takes it")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--only", choices=["prefill", "decode", "shared"])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rates = machine_rates(args.threads)
    print(
        f"{args.threads} threads: float32 FMA {rates[0] / 1e9:.0f} GFLOP/s, float16 FMA {rates[1] / 1e9:.0f} GFLOP/s, "
        f"memory {rates[2] / 1e9:.1f} GB/s"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = load_library(args.dim, Path(folder), args.march)
        kernel = CpuAttention(library, library.team(args.threads))
        for name in args.dtypes:
            dtype = DTYPES[name]
            if args.only in (None, "prefill"):
                prefill(kernel, args, dtype, rates)
            if args.only in (None, "decode"):
                decode(kernel, args, dtype, rates, 1, args.length)
                decode(kernel, args, dtype, rates, 16, args.length)
            if args.only in (None, "shared"):
                decode(kernel, args, dtype, rates, 16, 2500)
                decode(kernel, args, dtype, rates, 16, 2500, shared=125)


if __name__ == "__main__":
    main()
