"""The engine's side of the door (`engine.session_door`): requests that wait at it, and what becomes of blocks of sessions that
pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request, Sequence
from engine.scheduler import Scheduler
from engine.session_blocks import SessionBlocks
from engine.session_door import SessionDoor, Turn
from engine.session_numbers import session_number
from gateway.workers.protocol import RetentionHint
from prefix_cache.block_pool import IntegrityError

_MOST_OUTPUT = 2048
"""Tokens of an answer for which room is looked for, where `max_tokens` says more."""


@dataclass(frozen=True, slots=True)
class DoorFigures:
    """`held`: requests at the door, with so many tokens of prompts, and blocks that they will need. `in_progress`, `paused`:
    sessions. Totals since the start."""

    held: int = 0
    held_tokens: int = 0
    held_blocks: int = 0
    in_progress: int = 0
    paused: int = 0
    held_total: int = 0
    pauses_total: int = 0


class SessionScheduling:
    """Between arrival and the scheduler's queue. Belongs to the engine thread."""

    def __init__(
        self,
        door: SessionDoor,
        scheduler: Scheduler,
        blocks: SessionBlocks,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door = door
        self._scheduler = scheduler
        self._blocks = blocks
        self._block_size = block_size
        self._clock = clock
        self._held: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}  # of sessions, that went in and have not ended
        self._held_tokens = 0
        self._held_blocks = 0

    def figures(self) -> DoorFigures:
        """How it stands."""
        door = self._door
        counts = door.counts
        held, tokens, blocks = len(self._held), self._held_tokens, self._held_blocks
        return DoorFigures(held, tokens, blocks, door.in_progress, door.paused, counts.held, counts.paused)

    @property
    def is_crowded(self) -> bool:
        """True while somebody waits at the door or pauses."""
        return bool(self._held) or self._door.paused > 0

    def arrives(self, request: Request, born: int) -> bool:
        """True when it may go to the queue now. Those without a session, and those that another worker began, always may.
        born: what its session goes by at the door, the lower the earlier."""
        if not request.session or request.forked:
            return True
        sequence = request.sequences[0]
        turn = Turn(
            request.request_id,
            request.session,
            (request.priority, born, request.arrival, 0),
            sequence.digests,
            self._needs(request) - len(sequence.digests),
        )
        if self._door.arrives(turn, self._clock()):
            self._requests[request.request_id] = request
            return True
        self._hold(request)
        return False

    def before_step(self, now: float, *, idle: bool) -> None:
        """Moves turns between the door and the queue. `idle`: nothing else is there to compute."""
        for turn in self._door.let_in(now, idle=idle):
            request = self._unhold(turn.request_id)
            self._requests[request.request_id] = request
            self._scheduler.enqueue(request.sequences[0])
        for sequence in self._scheduler.loading:
            self.began(sequence.request)
        paused, back = self._door.pause_overflow(now)
        for turn in back:
            request = self._requests.pop(turn.request_id)
            self._scheduler.withdraw(request.sequences[0])
            self._hold(request)
        for session in paused:
            self._blocks.pauses(session)

    def told(self, hint: RetentionHint) -> bool:
        """What a gateway says of a session. False when it pauses, so that its blocks are nothing to be kept for it."""
        session, now = session_number(hint.tenant, hint.session), self._clock()
        if hint.state == "closed":
            self._door.closed(session)
        elif hint.state == "released":
            self._door.pinned(session, 0.0, now)
        elif hint.ttl is not None and hint.ttl > 0:
            self._door.pinned(session, hint.ttl, now)
        elif hint.state == "waiting":
            self._door.away(session, now, hint.return_p90, called=bool(hint.tools))
        return hint.state == "closed" or not self._door.is_paused(session)

    def worked(self, seconds: float) -> None:
        """A step took so long."""
        self._door.worked(seconds)

    def due_in(self, now: float, *, idle: bool) -> float | None:
        """Seconds after which to look again though nothing happens; None: never."""
        return self._door.due_in(now, idle=idle)

    def began(self, request: Request) -> None:
        """It is being computed."""
        if request.request_id in self._requests:
            self._door.began(request.session, request.request_id)

    def ended(self, request: Request, sequence: Sequence | None) -> None:
        """It has ended, with the blocks of `sequence`, or was dropped, wherever it was."""
        if request.request_id in self._held:
            self._unhold(request.request_id)
            self._door.leaves(request.request_id)
        elif self._requests.pop(request.request_id, None) is not None:
            digests = None if sequence is None else sequence.digests
            self._door.ended(request.session, request.request_id, digests, self._clock())

    def open(self) -> None:
        """The replica takes nothing new: all that wait may go."""
        self._door.open()

    def _hold(self, request: Request) -> None:
        self._held[request.request_id] = request
        self._held_tokens += request.prompt_tokens
        self._held_blocks += self._needs(request)

    def _unhold(self, request_id: str) -> Request:
        request = self._held.pop(request_id)
        self._held_tokens -= request.prompt_tokens
        self._held_blocks -= self._needs(request)
        return request

    def _needs(self, request: Request) -> int:
        """Blocks of its prompt and of an answer."""
        return -(-min(request.max_total, request.prompt_tokens + _MOST_OUTPUT) // self._block_size)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books balance."""
        self._door.check_integrity()
        if self._held.keys() != {turn.request_id for turn in self._door.waiting}:
            raise IntegrityError("requests are held that do not wait at the door")
