"""Random batches over poisoned KV memory, and the float64 answer that every attention kernel is held to."""

import torch

from engine.kernels import int8_kv
from engine.kernels.interface import AttentionSpec, StepBatch
from engine.kernels.reference import ReferenceAttention

# Relative to the largest value of the answer. bfloat16 holds 8 bits and its probabilities are rounded to it on AMX.
# int8: against the dequantised memory.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.int8: 5e-6}
# Where products are taken in half precision.
TOLERANCE_HALF = TOLERANCE | {torch.float16: 1.5e-2, torch.int8: 1.5e-2}


def tolerance_of(cpu_kernel):
    return TOLERANCE_HALF if cpu_kernel.library.has_half_products else TOLERANCE


def make_batch(sequences, block_size, num_blocks, generator, tables=None):
    """sequences: (new tokens, context) pairs. Blocks are handed out in random order unless there are `tables`; table padding
    points at block 0."""
    if tables is None:
        order = torch.randperm(num_blocks - 1, generator=generator).add_(1).tolist()
        width = max(-(-context // block_size) for _, context in sequences)
        tables = torch.zeros(len(sequences), width, dtype=torch.int32)
        for row, (_, context) in enumerate(sequences):
            for column in range(-(-context // block_size)):
                tables[row, column] = order.pop()
    positions, slots = [], []
    for (new, context), blocks in zip(sequences, tables.tolist(), strict=True):
        for position in range(context - new, context):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    starts = [0]
    for new, _ in sequences:
        starts.append(starts[-1] + new)
    contexts = tuple(context for _, context in sequences)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        query_start_list=tuple(starts),
        context_lens_list=contexts,
    )


def poisoned(dtype, *shape):
    """KV memory, [..., token, dim], in which every value is NaN (in int8, every scale)."""
    if dtype == torch.int8:
        return torch.full((*shape[:-1], shape[-1] + int8_kv.SCALE_BYTES), -1, dtype=dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


def floats(kv):
    return int8_kv.dequantize(kv) if kv.dtype == torch.int8 else kv


def exact(q, kv, spec, batch):
    """Attention in float64, one sequence at a time."""
    group = spec.num_heads // spec.num_kv_heads
    outs = []
    for row, context in enumerate(batch.context_lens_list):
        begin, end = batch.query_start_list[row : row + 2]
        new = end - begin
        blocks = batch.block_tables[row, : -(-context // kv.shape[3])].long()
        k, v = floats(kv[blocks]).double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, 1)
        scores = q[begin:end].double().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
        position, key = torch.arange(context - new, context)[:, None], torch.arange(context)[None]
        hidden = key > position
        if spec.window is not None:
            hidden |= key <= position - spec.window
        outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def check_attention(kernel, shape, dtype, window, block_size, batch, seed, *, tolerance=TOLERANCE, spread=1.0, bias=0.0):
    """Writes and attends with `kernel` over a batch of (new tokens, context) pairs, and holds the answer to float64, with the
    `tolerance` of its dtype.

    shape: heads, KV heads, dim. spread: standard deviation of the scores. bias: magnitude of what is added to every key in
    a few dims, as Qwen2's projections do. Returns the answer's largest error, relative to its largest value.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-context // block_size) for _, context in batch) + 2
    step = make_batch(batch, block_size, num_blocks, generator)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window)
    memory = poisoned(dtype, num_blocks, 3, 2, kv_heads, block_size, dim)  # block, layer, ...
    kv = memory[:, 1]
    io = torch.float32 if dtype == torch.int8 else dtype
    before = make_batch([(context, context) for _, context in batch], block_size, num_blocks, None, step.block_tables)
    offset = torch.zeros(kv_heads, dim)
    offset[:, :: dim // 4] = torch.randn(kv_heads, 4, generator=generator) * bias
    past = torch.randn(2, before.num_tokens, kv_heads, dim, generator=generator)
    past[0] += offset
    past = past.to(io)
    ReferenceAttention().write(kv, *past, before)  # what came before is there; everything else stays poison
    q, k, v = (torch.randn(step.num_tokens, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    q, k, v = (q * spread).to(io), (k + offset).to(io), v.to(io)
    kernel.write(kv, k, v, step)
    out = kernel.attend(q, kv, spec, step)
    wanted = exact(q, kv, spec, step)
    assert out.shape == wanted.shape
    assert torch.isfinite(out).all()
    error = float((out.double() - wanted).abs().max() / wanted.abs().max())
    assert error <= tolerance[dtype]
    assert floats(memory[:, [0, 2]]).isnan().all(), "another layer was written"
    return error
