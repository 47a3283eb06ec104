"""The Triton kernels against what this GPU can do: bytes a second, and for prefill operations a second.

    python tests/benchmarks/bench_triton.py [--dtype bfloat16] [--only decode]

Bytes are those that must be moved: inputs read once, outputs written once; of attention the keys and values of every context.
Beside them stands the rate of copying memory, measured here. Operations of a prefill are those of the products that a causal
mask leaves; beside them stands the rate of a large matrix product. Every call starts with a cold L2 cache
(triton.testing.do_bench); the median is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import single_batch
from engine.kernels.int8_kv import SCALE_BYTES
from engine.kernels.interface import AttentionSpec, StepBatch
from engine.models.operations import RMSNorm
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}


@dataclass(frozen=True)
class Work:
    """One call, and what it cannot do without: bytes moved, or operations (of two, the one that bounds it)."""

    name: str
    call: Callable[[], object]
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Sizes:
    """Of a model and its steps."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    block_size: int = 16
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (16, 4096), (64, 1024), (1, 65536))  # sequences, context
    prefills: tuple[tuple[int, int], ...] = ((512, 512), (512, 8192), (4096, 4096))  # new tokens, context
    rows: tuple[int, ...] = (1, 64, 4096)
    sampled: tuple[int, ...] = (1, 64)


def decode_batch(sequences: int, context: int, block_size: int, device: torch.device) -> StepBatch:
    """One new token for each of `sequences`, no block shared."""
    width = -(-context // block_size)
    tables = torch.arange(sequences * width, dtype=torch.int32, device=device).view(sequences, width)
    last = tables[:, -1].long() * block_size + (context - 1) % block_size
    return StepBatch(
        token_ids=torch.zeros(sequences, dtype=torch.int64, device=device),
        positions=torch.full((sequences,), context - 1, device=device),
        slots=last,
        query_start=torch.arange(sequences + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((sequences,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        query_start_list=tuple(range(sequences + 1)),
        context_lens_list=(context,) * sequences,
    )


def kv_memory(sizes: Sizes, tokens: int, memory: torch.dtype, device: torch.device) -> torch.Tensor:
    """One layer's KV, zeros: what the values are makes no kernel faster."""
    width = sizes.dim + SCALE_BYTES if memory == torch.int8 else sizes.dim
    shape = (-(-tokens // sizes.block_size), 2, sizes.kv_heads, sizes.block_size, width)
    return torch.zeros(shape, dtype=memory, device=device)


def attention_works(sizes: Sizes, memory: torch.dtype, device: torch.device) -> Iterator[Work]:
    from engine.kernels.triton.attention import TritonAttention

    kernel = TritonAttention()
    io = torch.bfloat16 if memory == torch.int8 else memory
    spec = AttentionSpec(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim**-0.5)
    for sequences, context in sizes.decodes:
        batch = decode_batch(sequences, context, sizes.block_size, device)
        kv = kv_memory(sizes, batch.block_tables.numel() * sizes.block_size, memory, device)
        q = torch.randn((sequences, sizes.heads, sizes.dim), device=device).to(io)
        moved = sequences * context * kv[0].nbytes // sizes.block_size + 2 * q.nbytes
        yield Work(
            f"decode {sequences} x {context}", lambda q=q, kv=kv, batch=batch: kernel.attend(q, kv, spec, batch), bytes=moved
        )
    for new, context in sizes.prefills:
        width = -(-context // sizes.block_size)
        batch = single_batch(range(width), context - new, new, sizes.block_size, device)
        kv = kv_memory(sizes, width * sizes.block_size, memory, device)
        q = torch.randn((new, sizes.heads, sizes.dim), device=device).to(io)
        seen = new * (context - new) + new * (new + 1) // 2
        yield Work(
            f"prefill {new} of {context}",
            lambda q=q, kv=kv, batch=batch: kernel.attend(q, kv, spec, batch),
            operations=4 * sizes.heads * sizes.dim * seen,
        )


def operation_works(sizes: Sizes, memory: torch.dtype, device: torch.device) -> Iterator[Work]:
    from engine.forward import PagedAttention
    from engine.kernels.triton.attention import TritonAttention
    from engine.kernels.triton.operations import TritonOperations

    class OnlyWrite(PagedAttention):
        def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
            return q

    operations = TritonOperations()
    io = torch.bfloat16 if memory == torch.int8 else memory
    norm = RMSNorm(torch.ones(sizes.hidden, device=device, dtype=io), 1e-5)
    spec = AttentionSpec(sizes.heads, sizes.kv_heads, sizes.dim, 1.0)
    for rows in sizes.rows:
        x, delta = torch.randn((2, rows, sizes.hidden), device=device).to(io)
        yield Work(f"residual and norm, {rows} rows", lambda x=x, d=delta: operations.add_norm(x, d, norm), bytes=4 * x.nbytes)
        gate_up = torch.randn((rows, 2 * sizes.inner), device=device).to(io)
        yield Work(f"SiLU and product, {rows} rows", lambda g=gate_up: operations.gate(g), bytes=gate_up.nbytes * 3 // 2)
        batch = single_batch(range(-(-rows // sizes.block_size)), 0, rows, sizes.block_size, device)
        kv = kv_memory(sizes, rows, memory, device).unsqueeze(1)
        paged = OnlyWrite(TritonAttention(), kv, (spec,), batch)
        qkv = torch.randn((rows, sizes.heads + 2 * sizes.kv_heads, sizes.dim), device=device).to(io)
        turn = torch.randn((2, rows, 1, sizes.dim), device=device).to(io)
        yield Work(
            f"rotation and KV write, {rows} rows",
            lambda p=paged, qkv=qkv, turn=turn: operations.attend(p, 0, qkv, sizes.heads, (turn[0], turn[1]), None),
            bytes=qkv.nbytes + turn.nbytes + qkv[:, : sizes.heads].nbytes + rows * kv[0].nbytes // sizes.block_size,
        )


def sampling_works(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Bytes: the logits, read once. What the sampler reads again and again is its own fault."""
    from engine.kernels.triton.sampling import TritonSampler

    sampler = TritonSampler()
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.8),
        "top_k 50": SamplingParams(temperature=0.8, top_k=50),
        "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    }
    ranked = -1.2 * torch.log(torch.arange(1, sizes.vocab + 1, device=device))
    for rows in sizes.sampled:
        logits = torch.stack([ranked[torch.randperm(sizes.vocab, device=device)] for _ in range(rows)])
        for name, params in kinds.items():
            states = [SamplingState(params, np.zeros(0, dtype=np.uint32), 7, row, ()) for row in range(rows)]
            yield Work(
                f"sampling {name}, {rows} rows",
                lambda logits=logits, states=states: sampler.choose(logits, states, None),
                bytes=logits.nbytes,
            )


def works(sizes: Sizes, memory: torch.dtype, device: torch.device) -> Iterator[Work]:
    yield from attention_works(sizes, memory, device)
    yield from operation_works(sizes, memory, device)
    yield from sampling_works(sizes, device)


Seconds = Callable[[Callable[[], object]], float]


def copied_bytes(device: torch.device, seconds: Seconds) -> float:
    """Bytes read and written a second."""
    source, target = torch.zeros((2, 1 << 30), dtype=torch.uint8, device=device)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def multiplied(device: torch.device, dtype: torch.dtype, seconds: Seconds) -> float:
    """Operations a second of a large product."""
    side = 8192
    square = torch.randn((side, side), device=device).to(dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of KV memory; of the rest too, but beside int8 bfloat16"
    )
    parser.add_argument("--only", default="", help="works whose name contains this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU here, or this torch is built without CUDA: nothing to measure.")
        return
    from triton.testing import do_bench

    def seconds(call: Callable[[], object]) -> float:
        return do_bench(call, return_mode="median") / 1e3

    device = torch.device("cuda")
    memory = DTYPES[args.dtype]
    io = torch.bfloat16 if memory == torch.int8 else memory
    bandwidth, rate = copied_bytes(device, seconds), multiplied(device, io, seconds)
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:.0f} GB/s copied, {rate / 1e12:.0f} TFLOP/s multiplied in {io}")
    with torch.inference_mode():
        for work in works(Sizes(), memory, device):
            if args.only not in work.name:
                continue
            took = seconds(work.call)
            done, best, unit = (
                (work.operations / 1e12, rate / 1e12, "TFLOP/s")
                if work.operations
                else (work.bytes / 1e9, bandwidth / 1e9, "GB/s")
            )
            print(f"{work.name:40} {took * 1e6:10.1f} us {done / took:9.1f} {unit:8} {done / took / best:6.1%}")


if __name__ == "__main__":
    main()
