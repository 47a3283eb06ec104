"""What the engine keeps of a request: the request, and one `Sequence` for each of its choices."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.block_table import BlockTable
from engine.sampling.state import SamplingState
from engine.sampling.stopping import StopChecker, StopDecision
from engine.speculation.lengths import DraftLength
from engine.speculation.ngrams import History
from gateway.workers.protocol import SamplingParams
from grammar.compiler import GrammarMatcher
from prefix_cache.hashing import BlockHash, DigestChain, chain_digest, pack_tokens

MAX_FORCED = 64
"""Tokens that a grammar forces on a sequence in one step, at most."""


class Status(enum.Enum):
    """Where a choice is. Only a LOADING and a RUNNING one hold blocks."""

    UNFORKED = enum.auto()  # waits for the prompt's prefill, which another choice does for all
    WAITING = enum.auto()  # in the queue: new, or preempted
    LOADING = enum.auto()  # its blocks come from a tier; it runs when they are here
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class ForbiddenTokenError(Exception):
    """A token that the request's grammar does not allow at its place."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: prompt + `output`, of which the first `computed` tokens have their KV in `table`.

    `digests` names the full blocks of what is known so far (empty without prefix caching), `published` of them were given to
    the pool. `matcher` stands after `output` in the grammar. The first `resumed` tokens of `output` were generated on another
    worker. `next_mask`: what the grammar allows after `output`, int32 [ceil(V / 32)], where it has been asked; `slow_mask`: the
    last one took long. `history` and `draft_lengths`, by drafter, belong to speculation. `broken`: what went wrong in the
    grammar between two tokens.
    """

    request: Request
    index: int
    sampling: SamplingState
    stops: StopChecker
    matcher: GrammarMatcher | None
    status: Status
    digests: DigestChain
    output: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    published: int = 0
    resumed: int = 0
    next_mask: torch.Tensor | None = None
    slow_mask: bool = False
    history: History | None = None
    draft_lengths: dict[str, DraftLength] = field(default_factory=dict)
    broken: Exception | None = None

    def append(self, token_id: int) -> StopDecision | None:
        """Takes in one more generated token; None: it goes on. Raises ForbiddenTokenError, and nothing of it is taken in."""
        if self.matcher is not None and not self.matcher.accept(token_id):
            raise ForbiddenTokenError
        self.next_mask = None
        self.sampling.append(token_id)
        decision = self.stops.append(token_id)
        if decision is None and self.matcher is not None and self.matcher.is_terminated():
            decision = StopDecision("stop")
        self.output.append(token_id)
        return decision

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.request.prompt_tokens + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is not computed; 1 while decoding, more while prefilling or recomputing."""
        return self.request.prompt_tokens + len(self.output) - self.computed

    @property
    def decodes(self) -> bool:
        """True where what is left to compute was generated just now: one token, or a few that the grammar forced."""
        return self.remaining == 1 or (self.computed >= self.request.prompt_tokens and self.remaining <= MAX_FORCED + 1)

    @property
    def is_trunk(self) -> bool:
        """True while it stands for the choices of its request that have not been forked off yet."""
        return self.index == 0 and not self.request.forked and len(self.request.sequences) > 1

    @property
    def slots(self) -> int:
        """How many of the engine's sequences it stands for."""
        return len(self.request.sequences) if self.is_trunk else 1

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Lower goes first: priority, seniority, arrival, choice."""
        return (self.request.priority, self.request.seniority, self.request.arrival, self.index)

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """uint32 [stop - start]: the tokens at these positions."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        output = np.asarray(self.output[max(0, start - len(prompt)) : stop - len(prompt)], dtype=np.uint32)
        return output if start >= len(prompt) else np.concatenate((prompt[start:], output))

    def name_blocks(self, count: int, block_size: int) -> None:
        """Extends `digests` to the first `count` blocks, all of which must be full of known tokens."""
        for index in range(len(self.digests), count):
            parent = self.digests[-1] if self.digests else self.request.root
            packed = pack_tokens(self.tokens(index * block_size, (index + 1) * block_size))
            self.digests.append(chain_digest(parent, packed))


@dataclass(slots=True, eq=False)
class Request:
    """A request that passed all checks, ready to be queued.

    prompt: uint32 [P]. max_total: tokens of prompt and generation. root: parent digest of the first block. priority: 0 where
    the policy does not look at it. arrival: a count of requests. seniority: lower goes first; 0 where all are
    alike. session: a number that stands for tenant and session, 0 for
    none. Times are on the engine's clock.
    """

    request_id: str
    prompt: npt.NDArray[np.uint32]
    params: SamplingParams
    max_total: int
    root: BlockHash
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    priority: int = 0
    arrival: int = 0
    seniority: int = 0
    session: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    added_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    decode_passes: int = 0
    ended: list[tuple[Sequence, StopDecision]] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def finished(self) -> bool:
        """True when every choice is."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated here by all choices."""
        return sum(len(sequence.output) - sequence.resumed for sequence in self.sequences)
