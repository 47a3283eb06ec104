"""Which worker holds which block, in which tier: block digest -> a set of (worker, tier), fed by KV events.

The set is one integer with a few bits per worker (prefix_cache.holders), so the longest resident prefix of a prompt is found
for all workers at once (prefix_cache.walking). What a worker reported and what was merely predicted of it (a prompt just
routed there) stand in different bits of the same integer and cost one lookup.

Memory: at most `max_blocks` blocks are remembered, of all workers together. Beyond that the least recently used are
forgotten, the end of a sequence before its beginning; used is what was stored, predicted, or computed as part of a prompt. A
worker that is forgotten, or whose snapshot replaces what was known, costs nothing at that moment: its bits die, and every
later change buries a few of the dead, faster than new ones can come. Predictions have a bound of their own.

Pure and single-threaded: no clock, no waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Protocol

from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, KVMessage, Snapshot
from prefix_cache.hashing import DIGEST_BYTES, BlockHash, split_digests
from prefix_cache.holders import PREDICTED, REMOTE, REPORTED_BITS, SLOT_BITS, STRIDE, TIER_BIT, TIERS, fold, fold_upto
from prefix_cache.walking import JUMP, WALKED, Ends, depth, every, jump, reader, walk

__all__ = ["REMOTE", "TIERS", "Hits", "Outcome", "Position", "Prediction", "ResidencyIndex"]

_SWEEP_PER_BLOCK = 4
_MAX_DEAD_SLOTS = 32
_MAX_INTERNED = 65_536
_MAX_NAMED_SETS = 4096
_TOUCHED_FROM = 0.75  # of the bound: below that nothing is forgotten soon
_EVICTED_AT_ONCE = 1024  # parts of the bound


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


class HoldsBlocks(Protocol):
    """`blocks`: remembered of one worker, in whatever tier."""

    @property
    def blocks(self) -> int: ...


@dataclass(slots=True)
class _Slot:
    number: int
    position: Position | None = None
    blocks: int = 0
    lower: int = 0
    careful: bool = False

    @property
    def shift(self) -> int:
        return self.number * STRIDE


@dataclass(frozen=True, slots=True)
class Hits:
    """Reported blocks of a prompt's beginning by the tier that they must be brought from: those on the device come first."""

    device: int
    host: int
    disk: int
    remote: int


@dataclass(slots=True, eq=False)
class Prediction:
    """Blocks that a worker will hold soon. Ends by `settle` (and the time given there) or `retract`."""

    slot: _Slot
    digests: Sequence[BlockHash]
    expires: float | None = field(default=None)


class ResidencyIndex:
    """Block digest -> workers and tiers. Workers are known by name and come into being with their first message."""

    def __init__(self, max_blocks: int = 4_000_000, max_predicted_blocks: int = 1_000_000, *, walked: int = WALKED) -> None:
        """`walked`: prompts of up to so many blocks are looked at block by block."""
        if max_blocks < 1 or max_predicted_blocks < 1:
            raise ValueError("the index must be allowed to hold at least one block and one predicted block")
        self._bound = max_blocks
        self._max_predicted = max_predicted_blocks
        self._walked = walked
        # In the order of their last use.
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
        self._careful_ones = 0
        self._lower_blocks = 0
        self._names_of: dict[int, tuple[str, ...]] = {}
        self.evicted = 0
        """Blocks forgotten to stay within the bound."""

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

    @property
    def held(self) -> Mapping[str, HoldsBlocks]:
        """The same of all workers, to be looked at while a decision is made."""
        return self._slots

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

        Workers that hold nothing of it are absent. Costs one dictionary access for every few dozen blocks, and a few for every
        worker that holds less than another.
        """
        if not digests:
            return {}
        find = walk if len(digests) <= self._walked or self._careful_ones else jump
        return self._by_name(find(self._masks, digests, self._live_ones, fold))

    def lookup_tiers(self, digests: Sequence[BlockHash]) -> tuple[dict[str, int], Mapping[str, Hits]]:
        """`lookup`, and for the workers that hold some of that in lower tiers only, how much of it where."""
        found = self.lookup(digests)
        if not self._lower_blocks:
            return found, {}
        lower = 0
        for name in found:
            slot = self._slots[name]
            if slot.lower:
                lower |= 1 << slot.shift
        if not lower:
            return found, {}
        by_tier: list[dict[str, int]] = []
        walked = len(digests) <= self._walked or bool(self._careful_ones)
        for tier in range(len(TIERS)):
            find = walk if walked else partial(jump, bits=(2 << tier) - 1)
            by_tier.append(self._by_name(find(self._masks, digests, lower, partial(fold_upto, tier=tier))))
        hits: dict[str, Hits] = {}
        for name, reported in by_tier[-1].items():
            device, host, disk = (upto.get(name, 0) for upto in by_tier[:-1])
            if device < reported:
                hits[name] = Hits(device, host - device, disk - host, reported - disk)
        return found, hits

    def reported(self, worker: str, digests: Sequence[BlockHash], upto: int) -> int:
        """How many of the first `upto` blocks the worker itself has reported to hold, without a gap."""
        slot = self._slots.get(worker)
        return 0 if slot is None else depth(self._masks, digests, min(upto, len(digests)), REPORTED_BITS << slot.shift)

    def check_order(self, worker: str, digests: Sequence[BlockHash]) -> bool:
        """Looks at these blocks of a prompt one by one. False: one is held without one before it: the worker's cache gives up
        beginnings before ends, and prompts are walked block by block as long as the worker is known."""
        slot = self._slots.get(worker)
        if slot is None:
            return True
        # What is only expected says nothing of the order in which a cache gives up its blocks.
        bits, masks = REPORTED_BITS << slot.shift, self._masks
        missing = False
        for digest in digests:
            if not masks.get(digest, 0) & bits:
                missing = True
            elif missing:
                break
        else:
            return True
        slot.careful = True
        self._careful_ones |= 1 << slot.shift
        return False

    def touch(self, digests: Sequence[BlockHash]) -> None:
        """A prompt with these blocks was computed: they are in use. Costs nothing while memory is not short."""
        masks = self._masks
        if len(masks) < _TOUCHED_FROM * self._bound:
            return
        for digest in reversed(list(digests)):
            mask = masks.pop(digest, None)
            if mask is not None:
                masks[digest] = mask

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
        self._names_of.clear()
        self._lower_blocks -= slot.lower
        self._live_ones &= ~(1 << slot.shift)
        self._careful_ones &= ~(1 << slot.shift)
        self._dead.add(slot.number)
        self._dead_bits |= SLOT_BITS << slot.shift
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
                self._dead_bits &= ~(SLOT_BITS << number * STRIDE)
            self._free.extend(self._sweeping)
            self._dead -= self._sweeping
            self._sweeping = set()
            if limit is not None:
                return

    # What is expected of workers

    def predict(self, worker: str, digests: Sequence[BlockHash], known: int = 0) -> Prediction | None:
        """The worker was just given a prompt with these blocks, of which it has the first `known`: from now on the others
        count as held by it. Of a long prompt some stand for all: those that `lookup` leaps to, and the last.

        None when the worker is unknown or there is nothing to predict. The oldest predictions make room when there are more
        than
        `max_predicted_blocks`.
        """
        slot = self._slots.get(worker)
        if slot is None or known >= len(digests):
            return None
        bits, fresh = SLOT_BITS << slot.shift, 1 << slot.shift + PREDICTED
        masks = self._masks
        standing = self._standing_for(digests, known)
        held = list(map(masks.get, standing))
        unknown = not any(held)
        added = standing if unknown else [d for d, mask in zip(standing, held, strict=True) if not (mask or 0) & bits]
        del added[self._max_predicted :]
        if not added:
            return None
        while self._predicted + len(added) > self._max_predicted:
            self.retract(self._settled[0] if self._settled else next(iter(self._open)))
        if unknown:
            masks.update(dict.fromkeys(reversed(added), self._interned.setdefault(fresh, fresh)))
        else:
            for digest in reversed(added):
                self._put(digest, masks.get(digest, 0) | fresh)
        if len(masks) > self._bound:
            self._evict()
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
        bit, masks = 1 << slot.shift + PREDICTED, self._masks
        for digest in prediction.digests:
            mask = masks.get(digest, 0)
            if mask & bit:
                self._put(digest, mask ^ bit)

    def expire(self, now: float) -> None:
        """Ends the predictions whose time has come."""
        settled = self._settled
        while settled and (settled[0].expires or 0.0) <= now:
            self.retract(settled[0])

    # Inside

    def _standing_for(self, digests: Sequence[BlockHash], known: int) -> list[BlockHash]:
        """What is looked at of a prompt after its first `known` blocks: every block where it is walked, else the beginning,
        which shorter prompts may share, the blocks that are leapt to, and the last."""
        count = len(digests)
        if count <= self._walked or (self._careful_ones and count - known <= self._walked):
            return list(digests[known:])
        head = list(digests[known : self._walked]) if known < self._walked else []
        first = -(-max(known, self._walked) // JUMP) * JUMP
        if count - first < JUMP * JUMP:
            at = reader(digests)
            leaps = [at(position) for position in range(first, count, JUMP)]
        else:
            leaps = list(every(digests, JUMP)[first // JUMP :])
        return [*head, *leaps, digests[-1]] if (count - 1) % JUMP else [*head, *leaps]

    def _open_slot(self, worker: str) -> _Slot:
        if self._free:
            number = self._free.pop()
        else:
            number = self._next_slot
            self._next_slot += 1
        slot = _Slot(number)
        self._slots[worker] = slot
        self._names[number] = worker
        self._names_of.clear()
        self._live_ones |= 1 << slot.shift
        return slot

    def _renew(self, worker: str) -> _Slot:
        self.remove_worker(worker)
        return self._open_slot(worker)

    def _store(self, slot: _Slot, tier: str, joined: bytes) -> None:
        number = TIER_BIT.get(tier)
        if number is None:
            return
        masks, interned = self._masks, self._interned
        bit, reported = 1 << slot.shift + number, REPORTED_BITS << slot.shift
        not_predicted = ~(1 << slot.shift + PREDICTED)
        # From the end, so that the end is forgotten first.
        digests = split_digests(joined[: len(joined) // DIGEST_BYTES * DIGEST_BYTES])[::-1]
        held = list(map(masks.get, digests))
        # Nobody holds most of them: they are new.
        unknown = digests if not any(held) else [digest for digest, mask in zip(digests, held, strict=True) if not mask]
        new = dict.fromkeys(unknown, interned.setdefault(bit, bit))
        masks.update(new)
        blocks = added = len(new)
        if len(unknown) < len(digests):
            for digest in [digest for digest, mask in zip(digests, held, strict=True) if mask]:
                mask = masks[digest]
                if mask & bit:
                    continue
                if not mask & reported:
                    blocks += 1
                # What is held need not be expected any more.
                mask = (mask | bit) & not_predicted
                masks[digest] = interned.setdefault(mask, mask)
                added += 1
        slot.blocks += blocks
        if number:
            slot.lower += added
            self._lower_blocks += added
        if len(masks) > self._bound:
            self._evict()
        self.sweep(len(joined) // DIGEST_BYTES * _SWEEP_PER_BLOCK)

    def _remove(self, slot: _Slot, tier: str, joined: bytes) -> None:
        number = TIER_BIT.get(tier)
        if number is None:
            return
        # What the worker says is gone is not to be expected either.
        bit, predicted = 1 << slot.shift + number, 1 << slot.shift + PREDICTED
        reported = REPORTED_BITS << slot.shift
        for start in range(0, len(joined) - DIGEST_BYTES + 1, DIGEST_BYTES):
            digest = joined[start : start + DIGEST_BYTES]
            mask = self._masks.get(digest, 0)
            left = mask & ~(bit | predicted)
            if left == mask:
                continue
            if mask & bit:
                slot.lower -= number > 0
                self._lower_blocks -= number > 0
                slot.blocks -= not left & reported
            self._put(digest, left)
        self.sweep(len(joined) // DIGEST_BYTES * _SWEEP_PER_BLOCK)

    def _evict(self) -> None:
        """Forgets the least recently used blocks: down to the bound and a little further, as each time costs a walk over the
        gaps that earlier ones have left."""
        masks = self._masks
        count = len(masks) - self._bound + self._bound // _EVICTED_AT_ONCE
        for digest in list(islice(masks, count)):
            mask = masks.pop(digest) & ~self._dead_bits
            while mask:
                number = ((mask & -mask).bit_length() - 1) // STRIDE
                bits = mask >> number * STRIDE & SLOT_BITS
                mask &= ~(SLOT_BITS << number * STRIDE)
                slot = self._slots[self._names[number]]
                if bits & REPORTED_BITS:
                    slot.blocks -= 1
                    lower = (bits & REPORTED_BITS & ~1).bit_count()
                    slot.lower -= lower
                    self._lower_blocks -= lower
        self.evicted += count

    def _put(self, digest: BlockHash, mask: int) -> None:
        if mask & ~self._dead_bits:
            self._masks[digest] = self._interned.setdefault(mask, mask)
        else:
            self._masks.pop(digest, None)

    def _by_name(self, ends: Ends) -> dict[str, int]:
        found: dict[str, int] = {}
        names_of = self._names_of
        for ones, count in ends:
            names = names_of.get(ones)
            if names is None:
                if len(names_of) >= _MAX_NAMED_SETS:
                    names_of.clear()
                names = names_of[ones] = tuple(self._names_in(ones))
            for name in names:
                found[name] = count
        return found

    def _names_in(self, ones: int) -> Iterator[str]:
        while ones:
            low = ones & -ones
            yield self._names[(low.bit_length() - 1) // STRIDE]
            ones ^= low
