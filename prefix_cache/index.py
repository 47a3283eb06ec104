"""Which worker holds which block, in which tier: block digest -> a set of (worker, tier), fed by KV events.

The set is one integer with a few bits per worker, so the longest resident prefix of a prompt is found for all workers in one
walk: AND the sets of its blocks one after the other until nobody is left. What a worker reported and what was merely
predicted of it (a prompt just routed there) stand in different bits of the same integer and cost one lookup.

Memory: at most `max_blocks_per_worker` blocks are remembered of each worker; what it stores beyond that is counted and not
indexed, which only makes its prefixes look shorter than they are. A worker that is forgotten, or whose snapshot replaces what
was known, costs nothing at that moment: its bits die, and every later change buries a few of the dead, faster than new ones
can come. Predictions have a bound of their own.

Pure and single-threaded: no clock, no waiting.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from prefix_cache.events import DEVICE, DISK, HOST, AllCleared, BlocksRemoved, BlocksStored, EventBatch, KVMessage, Snapshot
from prefix_cache.hashing import DIGEST_BYTES, BlockHash

REMOTE = "remote"
TIERS = (DEVICE, HOST, DISK, REMOTE)
"""Tiers the index tells apart, fastest first. Blocks in any other tier are not indexed."""

_PREDICTED = len(TIERS)
_STRIDE = len(TIERS) + 1
_SLOT_BITS = (1 << _STRIDE) - 1
_SWEEP_PER_BLOCK = 4
_MAX_DEAD_SLOTS = 32
_MAX_INTERNED = 65_536
_MAX_WALKS = 4096
_MAX_STEPS_BACK = 1024
_STEPS_BACK = 128
_TIER_BIT = {tier: number for number, tier in enumerate(TIERS)}


class Outcome(Enum):
    """What became of a KV message."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """Already known; nothing changed."""
    GAP = "gap"
    """Something is missing before it. Nothing was applied: subscribe again from `ResidencyIndex.position`."""


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch applied, in one life of a worker."""

    instance: str
    seq: int


@dataclass(slots=True)
class _Slot:
    number: int
    position: Position | None = None
    blocks: int = 0
    not_indexed: int = 0

    @property
    def shift(self) -> int:
        return self.number * _STRIDE


@dataclass(frozen=True, slots=True)
class _Walk:
    """A lookup that came to the block it is remembered by: `alive` held all blocks up to it, others as many as `found` says.
    True as long as no block has been lost since, of which `losses` were counted then."""

    losses: int
    alive: int
    found: dict[str, int]


@dataclass(slots=True, eq=False)
class Prediction:
    """Blocks that a worker will hold soon. Ends by `settle` (and the time given there) or `retract`."""

    slot: _Slot
    digests: Sequence[BlockHash]
    expires: float | None = field(default=None)


class ResidencyIndex:
    """Block digest -> workers and tiers. Workers are known by name and come into being with their first message."""

    def __init__(
        self,
        max_blocks_per_worker: int = 1_000_000,
        max_predicted_blocks: int = 1_000_000,
        *,
        remember_beyond: int = 32,
    ) -> None:
        """`remember_beyond`: where walks of more blocks ended is remembered."""
        if max_blocks_per_worker < 1 or max_predicted_blocks < 1:
            raise ValueError("the index must be allowed to hold at least one block per worker and one predicted block")
        self._bound = max_blocks_per_worker
        self._max_predicted = max_predicted_blocks
        self._masks: dict[BlockHash, int] = {}
        self._interned: dict[int, int] = {}
        self._slots: dict[str, _Slot] = {}
        self._names: dict[int, str] = {}
        self._live_ones = 0
        self._free: list[int] = []
        self._next_slot = 0
        self._dead: set[int] = set()
        self._dead_bits = 0
        self._to_sweep: list[BlockHash] = []
        self._sweeping: set[int] = set()
        self._open: dict[Prediction, None] = {}
        self._settled: deque[Prediction] = deque()
        self._predicted = 0
        self._walks: OrderedDict[BlockHash, _Walk] = OrderedDict()
        self._losses = 0
        self._remember_beyond = remember_beyond

    # What is known

    def __len__(self) -> int:
        """Distinct blocks in memory, those of forgotten workers that are not yet buried among them."""
        return len(self._masks)

    @property
    def predicted_blocks(self) -> int:
        return self._predicted

    def blocks(self, worker: str) -> int:
        """Blocks remembered of a worker, in whatever tier; 0 for an unknown one."""
        slot = self._slots.get(worker)
        return 0 if slot is None else slot.blocks

    def not_indexed(self, worker: str) -> int:
        """Blocks of a worker that its bound kept out, since its last snapshot."""
        slot = self._slots.get(worker)
        return 0 if slot is None else slot.not_indexed

    def position(self, worker: str) -> Position | None:
        """From where to subscribe again. None: nothing is known of the worker's event stream."""
        slot = self._slots.get(worker)
        return None if slot is None else slot.position

    def tiers(self, worker: str, digest: BlockHash) -> tuple[str, ...]:
        """The tiers in which a worker has reported a block, fastest first."""
        slot = self._slots.get(worker)
        if slot is None:
            return ()
        bits = self._masks.get(digest, 0) >> slot.shift
        return tuple(tier for number, tier in enumerate(TIERS) if bits >> number & 1)

    def lookup(self, digests: Sequence[BlockHash]) -> dict[str, int]:
        """How many blocks of a prompt, counted from its beginning without a gap, each worker holds or is predicted to.

        Workers that hold nothing of it are absent. Takes one dictionary access per block until nobody is left, and a few
        operations wherever the set of holders changes. A prompt that goes on where an earlier one was found to end is only
        walked from there, as long as no block was lost meanwhile.
        """
        start, alive, found = self._resume(digests)
        count = start
        for mask, run in groupby(map(self._masks.get, digests[start:] if start else digests)):
            left = alive & _fold(mask) if mask is not None else 0
            if left != alive:
                if count:
                    self._note(found, alive & ~left, count)
                if not left:
                    self._remember(digests, count, alive, found)
                    return found
                alive = left
            count += len(list(run))  # The whole run of equal sets is walked in C.
        if count and alive:
            self._remember(digests, count, alive, found)
            self._note(found, alive, count)
        return found

    # What workers report

    def apply(self, worker: str, message: KVMessage) -> Outcome:
        """Takes in one message of a worker's event stream.

        A snapshot replaces all that was known. A batch or heartbeat of another life of the worker forgets all that was
        known, except that a life's first batch can be applied at once.
        """
        if isinstance(message, Snapshot):
            for _ in self.load_snapshot(worker, message):
                pass
            return Outcome.APPLIED
        slot = self._slots.get(worker) or self._open_slot(worker)
        batch = message if isinstance(message, EventBatch) else None
        if slot.position is None or slot.position.instance != message.instance:
            if slot.position is not None or slot.blocks:
                slot = self._renew(worker)
            if message.seq > (1 if batch else 0):
                return Outcome.GAP
            slot.position = Position(message.instance, 0)
        seq = slot.position.seq
        if batch is None:
            return Outcome.APPLIED if message.seq == seq else Outcome.GAP if message.seq > seq else Outcome.DUPLICATE
        if message.seq <= seq:
            return Outcome.DUPLICATE
        if message.seq > seq + 1:
            return Outcome.GAP
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self._store(slot, event.tier, event.digests)
            elif isinstance(event, BlocksRemoved):
                self._remove(slot, event.tier, event.digests)
            elif isinstance(event, AllCleared):
                slot = self._renew(worker)
        slot.position = Position(message.instance, message.seq)
        return Outcome.APPLIED

    def load_snapshot(self, worker: str, snapshot: Snapshot, chunk_blocks: int = 4096) -> Iterator[None]:
        """Like `apply`, in steps of `chunk_blocks` blocks, so that an event loop can do other things in between.

        Between steps the worker is known by what was loaded so far, and its position is None: an iteration that is given
        up half-way leaves nothing wrong behind. If the worker is renewed meanwhile, the rest is not loaded.
        """
        slot = self._renew(worker)
        step = chunk_blocks * DIGEST_BYTES
        for tier, joined in snapshot.tiers.items():
            for start in range(0, len(joined), step):
                if self._slots.get(worker) is not slot:
                    return
                self._store(slot, tier, joined[start : start + step])
                yield
        if self._slots.get(worker) is slot:
            slot.position = Position(snapshot.instance, snapshot.seq)

    def remove_worker(self, worker: str) -> None:
        """Forgets a worker and all predictions of it. O(1); unknown names are ignored."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        del self._names[slot.number]
        self._live_ones &= ~(1 << slot.shift)
        self._losses += 1
        self._dead.add(slot.number)
        self._dead_bits |= _SLOT_BITS << slot.shift
        if len(self._dead) > _MAX_DEAD_SLOTS:
            self.sweep(None)

    def sweep(self, limit: int | None) -> None:
        """Looks at up to `limit` blocks (None: all) for bits of forgotten workers, and drops those. Runs by itself too."""
        if len(self._interned) > _MAX_INTERNED:
            self._interned.clear()
        while self._dead or self._to_sweep:
            if not self._to_sweep:
                self._to_sweep = list(self._masks)
                self._sweeping = set(self._dead)
            taken = len(self._to_sweep) if limit is None else min(limit, len(self._to_sweep))
            masks, keep = self._masks, ~self._dead_bits
            for _ in range(taken):
                digest = self._to_sweep.pop()
                mask = masks.get(digest, 0)
                left = mask & keep
                if left != mask:
                    self._put(digest, left)
            if self._to_sweep:
                return
            # Slots that died while this pass ran may still stand in blocks it had passed: they wait for the next one.
            for number in self._sweeping:
                self._dead_bits &= ~(_SLOT_BITS << number * _STRIDE)
            self._free.extend(self._sweeping)
            self._dead -= self._sweeping
            self._sweeping = set()
            if limit is not None:
                return

    # What is expected of workers

    def predict(self, worker: str, digests: Sequence[BlockHash]) -> Prediction | None:
        """The worker was just given a prompt with these blocks: from now on they count as held by it.

        Give only those it does not hold yet. None when the worker is unknown or there is nothing to predict. The oldest
        predictions make room when there are more than `max_predicted_blocks`.
        """
        slot = self._slots.get(worker)
        if slot is None:
            return None
        bits, fresh = _SLOT_BITS << slot.shift, 1 << slot.shift + _PREDICTED
        masks = self._masks
        added = [digest for digest in digests[: self._max_predicted] if not masks.get(digest, 0) & bits]
        if not added:
            return None
        while self._predicted + len(added) > self._max_predicted:
            self.retract(self._settled[0] if self._settled else next(iter(self._open)))
        for digest in added:
            self._put(digest, masks.get(digest, 0) | fresh)
        prediction = Prediction(slot, added)
        self._open[prediction] = None
        self._predicted += len(added)
        self.sweep(len(added) * _SWEEP_PER_BLOCK)
        return prediction

    def settle(self, prediction: Prediction, expires: float) -> None:
        """The prompt was computed: events must have confirmed its blocks by `expires`, when the prediction ends.

        Times must not go back from one call to the next by much: predictions end in the order in which they settle.
        """
        if prediction in self._open:
            del self._open[prediction]
            prediction.expires = expires
            self._settled.append(prediction)

    def retract(self, prediction: Prediction) -> None:
        """Ends a prediction at once; idempotent."""
        if prediction in self._open:
            del self._open[prediction]
        elif self._settled and self._settled[0] is prediction:
            self._settled.popleft()
        elif prediction in self._settled:
            self._settled.remove(prediction)
        else:
            return
        self._predicted -= len(prediction.digests)
        slot = prediction.slot
        if self._names.get(slot.number) is None or self._slots.get(self._names[slot.number]) is not slot:
            return  # Its bits are dead or buried, and its number may belong to another by now.
        keep = ~(1 << slot.shift + _PREDICTED)
        for digest in prediction.digests:
            mask = self._masks.get(digest, 0)
            if mask & ~keep:
                self._lost(mask, mask & keep)
                self._put(digest, mask & keep)

    def expire(self, now: float) -> None:
        """Ends the predictions whose time has come."""
        settled = self._settled
        while settled and (settled[0].expires or 0.0) <= now:
            self.retract(settled[0])

    # Inside

    def _resume(self, digests: Sequence[BlockHash]) -> tuple[int, int, dict[str, int]]:
        """Where to begin a walk: (blocks that need not be looked at, who holds all of them, how many the others hold)."""
        for position, walk in self._walks_back(digests):
            if walk.losses != self._losses:
                break
            # Who did not hold all of it may do so by now; then it holds the block that was missing.
            others = self._live_ones & ~walk.alive
            while others:
                low = others & -others
                others ^= low
                at = walk.found.get(self._names[(low.bit_length() - 1) // _STRIDE], 0)
                if _fold(self._masks.get(digests[at], 0)) & low:
                    return 0, self._live_ones, {}
            return position + 1, walk.alive, dict(walk.found)
        return 0, self._live_ones, {}

    def _walks_back(self, digests: Sequence[BlockHash]) -> Iterator[tuple[int, _Walk]]:
        """Remembered walks that ended within `digests`, the longest first."""
        end = len(digests)
        lowest = max(end - _MAX_STEPS_BACK, self._remember_beyond)
        while end > lowest:
            start = max(end - _STEPS_BACK, lowest)
            for offset, walk in enumerate(map(self._walks.get, reversed(list(digests[start:end])))):
                if walk is not None:
                    yield end - 1 - offset, walk
            end = start

    def _remember(self, digests: Sequence[BlockHash], count: int, alive: int, found: dict[str, int]) -> None:
        if count <= self._remember_beyond:
            return
        self._walks[digests[count - 1]] = _Walk(self._losses, alive & self._live_ones, dict(found))
        if len(self._walks) > _MAX_WALKS:
            self._walks.popitem(last=False)

    def _lost(self, before: int, after: int) -> None:
        """A block's holders are `after`, and were `before`: walks over it may be wrong if somebody has gone."""
        if _fold(before) & ~_fold(after) & self._live_ones:
            self._losses += 1

    def _open_slot(self, worker: str) -> _Slot:
        if self._free:
            number = self._free.pop()
        else:
            number = self._next_slot
            self._next_slot += 1
        slot = _Slot(number)
        self._slots[worker] = slot
        self._names[number] = worker
        self._live_ones |= 1 << slot.shift
        return slot

    def _renew(self, worker: str) -> _Slot:
        self.remove_worker(worker)
        return self._open_slot(worker)

    def _store(self, slot: _Slot, tier: str, joined: bytes) -> None:
        number = _TIER_BIT.get(tier)
        if number is None:
            return
        masks, interned = self._masks, self._interned
        bit, bits = 1 << slot.shift + number, _SLOT_BITS << slot.shift
        reported = bits & ~(1 << slot.shift + _PREDICTED)
        for start in range(0, len(joined) - DIGEST_BYTES + 1, DIGEST_BYTES):
            digest = joined[start : start + DIGEST_BYTES]
            mask = masks.get(digest, 0)
            if not mask & reported:
                if slot.blocks >= self._bound:
                    slot.not_indexed += 1
                    continue
                slot.blocks += 1
            mask |= bit
            masks[digest] = interned.setdefault(mask, mask)
        self.sweep(len(joined) // DIGEST_BYTES * _SWEEP_PER_BLOCK)

    def _remove(self, slot: _Slot, tier: str, joined: bytes) -> None:
        number = _TIER_BIT.get(tier)
        if number is None:
            return
        bits = _SLOT_BITS << slot.shift
        # What the worker says is gone is not to be expected either.
        predicted = 1 << slot.shift + _PREDICTED
        gone = predicted | 1 << slot.shift + number
        for start in range(0, len(joined) - DIGEST_BYTES + 1, DIGEST_BYTES):
            digest = joined[start : start + DIGEST_BYTES]
            mask = self._masks.get(digest, 0)
            left = mask & ~gone
            if left == mask:
                continue
            if mask & bits & ~predicted and not left & bits:
                slot.blocks -= 1
            self._lost(mask, left)
            self._put(digest, left)
        self.sweep(len(joined) // DIGEST_BYTES * _SWEEP_PER_BLOCK)

    def _put(self, digest: BlockHash, mask: int) -> None:
        if mask & ~self._dead_bits:
            self._masks[digest] = self._interned.setdefault(mask, mask)
        else:
            self._masks.pop(digest, None)

    def _note(self, found: dict[str, int], ones: int, count: int) -> None:
        while ones:
            low = ones & -ones
            found[self._names[(low.bit_length() - 1) // _STRIDE]] = count
            ones ^= low


def _fold(mask: int) -> int:
    """Moves 'in any tier, or predicted' of every slot to its lowest bit; the other bits are meaningless."""
    folded = mask
    for number in range(1, _STRIDE):
        folded |= mask >> number
    return folded
