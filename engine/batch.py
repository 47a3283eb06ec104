"""A step plan as the tensors that the decoder and the attention kernel take."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.interface import StepBatch
from engine.scheduler import ScheduledSequence


def single_batch(
    table: SequenceOf[int], start: int, count: int, block_size: int, device: torch.device | str = "cpu"
) -> StepBatch:
    """Positions `start` to `start + count` of one sequence whose blocks are `table`, all of them token 0: for measuring and
    warming up."""
    positions = np.arange(start, start + count, dtype=np.int64)
    blocks = np.asarray(table, dtype=np.int32)
    slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepBatch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([start + count], dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(blocks).unsqueeze(0).to(device),
        query_start_list=(0, count),
        context_lens_list=(start + count,),
    )


def build_batch(scheduled: SequenceOf[ScheduledSequence], block_size: int, device: torch.device) -> StepBatch:
    """The ragged batch of at least one scheduled sequence, in their order."""
    starts = [0]
    contexts = []
    for item in scheduled:
        starts.append(starts[-1] + item.count)
        contexts.append(item.start + item.count)
    total = starts[-1]
    tokens = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    widths = [-(-context // block_size) for context in contexts]
    tables = np.zeros((len(scheduled), max(widths)), dtype=np.int32)
    for row, (item, low, width) in enumerate(zip(scheduled, starts, widths, strict=False)):
        sequence, start = item.sequence, item.start
        table = sequence.table.array
        tables[row, :width] = table[:width]
        if item.count == 1:
            tokens[low] = sequence.tokens(start, start + 1)[0]
            positions[low] = start
            slots[low] = sequence.table[start // block_size] * block_size + start % block_size
        else:
            high = low + item.count
            tokens[low : low + item.known] = sequence.tokens(start, start + item.known)
            if item.draft is not None:
                tokens[low + item.known : high] = item.draft.tokens
            own = np.arange(start, start + item.count)
            positions[low:high] = own
            slots[low:high] = table[own // block_size].astype(np.int64) * block_size + own % block_size
    return StepBatch(
        token_ids=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(tables).to(device),
        query_start_list=tuple(starts),
        context_lens_list=tuple(contexts),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence, uint32 [T], T > 0, from position `start` on; `table`: its blocks, int32."""

    tokens: npt.NDArray[np.uint32]
    start: int
    table: npt.NDArray[np.int32]


def ragged_batch(parts: SequenceOf[Part], block_size: int, device: torch.device) -> StepBatch:
    """The batch of at least one part, in their order."""
    counts = [len(part.tokens) for part in parts]
    contexts = [part.start + count for part, count in zip(parts, counts, strict=True)]
    widths = [-(-context // block_size) for context in contexts]
    tables = np.zeros((len(parts), max(widths)), dtype=np.int32)
    slots = []
    positions = [np.arange(part.start, context, dtype=np.int64) for part, context in zip(parts, contexts, strict=True)]
    for row, (part, width, own) in enumerate(zip(parts, widths, positions, strict=True)):
        tables[row, :width] = part.table[:width]
        slots.append(part.table[own // block_size].astype(np.int64) * block_size + own % block_size)
    starts = [0, *np.cumsum(counts).tolist()]
    return StepBatch(
        token_ids=torch.from_numpy(np.concatenate([part.tokens for part in parts]).astype(np.int64)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(tables).to(device),
        query_start_list=tuple(starts),
        context_lens_list=tuple(contexts),
    )
