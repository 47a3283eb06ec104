"""What this gateway has in flight on one worker: exact, because it is booked when sent and struck out on every way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """How far a request has come."""

    WAITING = "waiting"
    """Sent; its prompt is not computed yet."""
    RUNNING = "running"
    """Its first token has come."""
    CLOSED = "closed"


class Lease:
    """One request's entry in the books. `close` strikes it out, once, whatever happened before."""

    __slots__ = ("_books", "blocks", "phase", "prompt_tokens", "work_tokens")

    def __init__(self, books: InFlight, prompt_tokens: int, work_tokens: int, blocks: int) -> None:
        self.blocks = blocks
        self._books = books
        self.prompt_tokens = prompt_tokens
        self.work_tokens = work_tokens
        self.phase = Phase.WAITING

    def cached(self, cached_tokens: int) -> None:
        """The worker says how much of the prompt it need not compute: the estimate gives way to the truth."""
        if self.phase is Phase.WAITING:
            work = max(self.prompt_tokens - cached_tokens, 0)
            self._books.queued_tokens += work - self.work_tokens
            self.work_tokens = work

    def running(self) -> None:
        """The first token has come; idempotent."""
        if self.phase is Phase.WAITING:
            self.phase = Phase.RUNNING
            self._books.running_blocks += self.blocks
            self._books.waiting -= 1
            self._books.running += 1
            self._books.queued_tokens -= self.work_tokens
            self._books.waiting_prompt_tokens -= self.prompt_tokens

    def close(self) -> None:
        """Strikes the entry out; idempotent."""
        self.running()
        if self.phase is Phase.RUNNING:
            self.phase = Phase.CLOSED
            self._books.running -= 1
            self._books.blocks -= self.blocks
            self._books.running_blocks -= self.blocks
            self._books.freed()


@dataclass(slots=True)
class InFlight:
    """Requests and tokens in flight on one worker.

    `queued_tokens`: prompt tokens still to be computed (without what is expected to be cached) of requests whose first
    token has not come. `waiting_prompt_tokens`: the whole prompts of those, the measure that workers report. `blocks`: of KV
    that all of them may need until they end; `running_blocks`: those of `running` ones. `opened`: requests since the start.
    `freed` is called whenever a request has ended.
    """

    waiting: int = 0
    running: int = 0
    queued_tokens: int = 0
    waiting_prompt_tokens: int = 0
    blocks: int = 0
    running_blocks: int = 0
    opened: int = field(default=0, compare=False)
    freed: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def requests(self) -> int:
        return self.waiting + self.running

    def open(self, prompt_tokens: int, matched_tokens: int, blocks: int = 0) -> Lease:
        """Books a request that is about to be sent. `blocks`: of KV that it may need until it ends."""
        lease = Lease(self, prompt_tokens, max(prompt_tokens - matched_tokens, 0), blocks)
        self.blocks += blocks
        self.opened += 1
        self.waiting += 1
        self.queued_tokens += lease.work_tokens
        self.waiting_prompt_tokens += prompt_tokens
        return lease
