"""How much a worker can be given beside what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.workers.protocol import SamplingParams, WorkerInfo, WorkerStats


@dataclass(slots=True)
class WorkerRoom:
    """What is left of one worker. `idle`: it has nothing to do, so that any request may go there, however large. `held_blocks`,
    `held`: of requests that wait there until sessions in progress leave room: turns of those sessions go before them."""

    name: str
    blocks: float
    slots: float
    idle: bool
    held_blocks: int = 0
    held: int = 0

    def takes(self, blocks: int, *, continuing: bool = False) -> bool:
        """Whether a request that needs so many blocks of KV may go there. `continuing`: its session is in progress."""
        if self.idle:
            return True
        if continuing:
            return self.slots + self.held >= 1 and self.blocks + self.held_blocks >= blocks
        return self.slots >= 1 and self.blocks >= blocks

    def reserve(self, blocks: int) -> None:
        """Books such a request."""
        self.blocks -= blocks
        self.slots -= 1
        self.idle = False


Rooms = Callable[[str], Sequence[WorkerRoom]]
"""The workers that may take a turn of a model now, with what is left of them. The caller may change what it gets."""

SomeRoom = Callable[[str], WorkerRoom | None]
"""One worker of those, which is likely to have room: what most turns need to know. None where none comes to mind."""


def room_of(name: str, info: WorkerInfo, stats: WorkerStats | None, blocks: int, requests: int, *, ahead: float) -> WorkerRoom:
    """`blocks`: that requests in flight from here need until they end; `requests`: in flight there, others' among them.

    Others' blocks are seen where more is in use than is accounted for here. A worker that does not say how much KV it has, or
    how many requests it takes at once, has no such limit.
    """
    used = blocks
    held_blocks = held = 0
    if stats is not None:
        held_blocks, held = min(stats.held_blocks, blocks), min(stats.held, requests)
        used = max(used, stats.num_blocks - stats.free_blocks - stats.cached_blocks)
    return WorkerRoom(
        name,
        info.num_blocks * (1 + ahead) - used if info.num_blocks > 0 else float("inf"),
        info.max_concurrency * (1 + ahead) - requests if info.max_concurrency > 0 else float("inf"),
        requests == 0,
        held_blocks,
        held,
    )


def needed_blocks(tokens: int, output: int, info: WorkerInfo | None) -> int:
    """Blocks that a prompt of so many tokens needs with an answer of up to `output`, which may not be longer than the context
    holds. What is set aside for answers is a guess, so one of them never takes more than an eighth of a worker's KV."""
    if info is None or info.num_blocks <= 0:
        return 0
    room = max(min(info.max_model_len - tokens, info.num_blocks * info.block_size // 8), 0)
    return -(-(tokens + min(output, room)) // max(info.block_size, 1))


def reserved_output(sampling: SamplingParams, reserve: int) -> int:
    """Tokens of answers that a prompt is expected to get at most."""
    longest = reserve if sampling.max_tokens is None else min(sampling.max_tokens, reserve)
    return longest * sampling.n


def choose(
    rooms: Sequence[WorkerRoom], needs: Sequence[int], *, continuing: bool = False
) -> list[tuple[WorkerRoom, int]] | None:
    """Workers that together take requests of these needs, each where most is left; None when they do not. The rooms are
    booked when they do. `continuing`: their session is in progress."""
    if len(needs) == 1 and len(rooms) == 1:
        # Most turns, once some worker comes to mind.
        if not rooms[0].takes(needs[0], continuing=continuing):
            return None
        rooms[0].reserve(needs[0])
        return [(rooms[0], needs[0])]
    booked: list[tuple[WorkerRoom, int]] = []
    undo = [(room.blocks, room.slots, room.idle) for room in rooms]
    for need in needs:
        able = [room for room in rooms if room.takes(need, continuing=continuing)]
        if not able:
            # More prompts in one request than all workers take at once: they go when nothing else is there, and queue.
            if booked and all(was_idle for _, _, was_idle in undo):
                continue
            for room, (blocks, slots, idle) in zip(rooms, undo, strict=True):
                room.blocks, room.slots, room.idle = blocks, slots, idle
            return None
        best = max(able, key=lambda room: (room.idle, room.blocks, room.slots))
        best.reserve(need)
        booked.append((best, need))
    return booked
