"""Which blocks of a draft model's KV memory belong to which sequence, and for which of its tokens they are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.block_table import BlockTable
from engine.request import Sequence, Status
from prefix_cache.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class Held:
    """What a draft model has of one sequence: `computed` tokens in `table`, of which the first `published` blocks can be found.
    `guessed` are the tokens it was given from position `known` on, before anybody knew what would come there."""

    sequence: Sequence
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    published: int = 0
    known: int = 0
    guessed: list[int] = field(default_factory=list)


class DraftCache:
    """Full blocks of known tokens are published under the names that the engine has for them, in a pool of their own: the next
    turn of a session finds them. A sequence that no block is left for is not drafted for; nobody gives a block back for it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self._held: dict[int, Held] = {}  # by id(sequence)

    def hold(self, sequence: Sequence) -> Held:
        """What there is of a sequence, as far as its tokens are what it was computed from."""
        held = self._held.get(id(sequence))
        if held is None:
            held = self._held[id(sequence)] = Held(sequence)
            # The last known token is computed in any case: guesses follow from it.
            count = min(len(sequence.digests), (sequence.num_tokens - 1) // self.pool.block_size)
            found = self.pool.find(sequence.digests[:count])
            self.pool.touch(found)
            held.table.extend(found)
            held.published = len(found)
            held.computed = len(found) * self.pool.block_size
            return held
        if held.computed > held.known:
            came = sequence.tokens(held.known, min(sequence.num_tokens, held.computed)).tolist()
            true = next(
                (at for at, (one, other) in enumerate(zip(came, held.guessed, strict=False)) if one != other), len(came)
            )
            held.computed = held.known + true
        held.computed = min(held.computed, sequence.num_tokens - 1)
        held.guessed.clear()
        return held

    def reserve(self, held: Held, tokens: int) -> bool:
        """Makes room for the sequence's first `tokens` tokens. False, with nothing changed, when there is none."""
        missing = -(-tokens // self.pool.block_size) - len(held.table)
        if missing > self.pool.num_available:
            return False
        if missing > 0:
            held.table.extend(self.pool.allocate(missing))
        return True

    def publish(self, held: Held) -> None:
        """What is full of known tokens can be found from now on."""
        sequence = held.sequence
        full = min(held.computed, sequence.num_tokens) // self.pool.block_size
        full = min(full, len(sequence.digests))  # without prefix caching blocks have no names
        if full <= held.published:
            return
        start = held.published
        parent = sequence.digests[start - 1] if start else sequence.request.root
        own = held.table.part(start, full)
        held.table.replace(start, self.pool.publish(own, sequence.digests[start:full], parent))
        held.published = full

    def forget_idle(self) -> None:
        """Takes the blocks of sequences back that do not run any more."""
        for key, held in list(self._held.items()):
            if held.sequence.status is not Status.RUNNING:
                del self._held[key]
                self.pool.free(held.table.take())
        self.pool.take_events()  # nobody follows this pool

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the pool's references are exactly those of the sequences."""
        self.pool.check_integrity(Counter(block for held in self._held.values() for block in held.table.part(0)))
