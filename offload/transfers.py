"""The threads that move blocks between the device and the tiers, while the engine computes.

Loads come in batches, one ticket a request, the shortest first, and all loaders work at one. What host memory does not have is
read from disk, verified, put into host memory too, and copied to the device. Stores are copied to host memory as blocks fill,
and written to disk behind that.
A block may be given up and overwritten while it is copied: its generation tells, and then the copy is not kept. So neither a
store nor a load ever holds up the engine, and a block that waits to be stored is not held for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offload.checksum import Bytes
from offload.codecs import BlockShape, Codec, CodecName, make_codec
from offload.device import DeviceBlocks
from offload.guard import GuardedTier
from offload.tickets import LANES, LoadTicket
from offload.tier import Outgoing
from prefix_cache.events import HOST
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

_STORE_BATCH = 16
_STORE_SHARE = 0.03
_LONGEST_SPARING = 0.5
_MAX_STORES = 16_384
_MAX_WRITES = 65_536
_MAX_STAGED_BYTES = 64 << 20
_AGE = 1.0
_USEFUL_FOR = 600.0
_WAIT = 0.05

ItemT = TypeVar("ItemT")


class Filled(NamedTuple):
    """A block of the device that is full: it is that block as long as `generation` is that of the pool's books."""

    digest: BlockHash
    block: int
    generation: int
    depth: int
    session: int = 0


@dataclass(slots=True)
class TransferCounts:
    """Since the start, of this process. `stale`: blocks overwritten before they were stored. `dropped`: too many waited."""

    stored: int = 0
    stale: int = 0
    dropped: int = 0
    unfit: int = 0
    written: int = 0
    promoted: int = 0
    useless: int = 0


class Transfers:
    """Moves blocks for one engine. `tiers`: the fastest first. `generations`: of the pool, read only.

    `on_done` is called on a transfer thread when a ticket is done. Tickets are given back by `finished`.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        device: DeviceBlocks,
        generations: Sequence[int],
        codec: CodecName,
        shape: BlockShape,
        on_done: Callable[[], None],
    ) -> None:
        self.tiers = tuple(tiers)
        self.counts = TransferCounts()
        self._device = device
        self._generations = generations
        self._codec = codec
        self._shape = shape
        self._on_done = on_done
        self._host = next((tier for tier in tiers if tier.name == HOST), None)
        self._below = tuple(tier for tier in tiers if tier.name != HOST)
        self._condition = threading.Condition()
        self._closing = False
        self._loads: deque[LoadTicket] = deque()
        self._fetches: deque[LoadTicket] = deque()
        self._stores: deque[Filled] = deque()
        self._writes: deque[tuple[BlockHash, int, int, Bytes | None]] = deque()
        self._staged = 0
        self._promotions: deque[BlockHash] = deque()
        self._promoted: OrderedDict[BlockHash, float] = OrderedDict()
        self._finished: deque[LoadTicket] = deque()
        self._busy = 0
        self._is_computing = False
        self._backlog = len(generations) // 64
        work: list[tuple[str, deque[Any], Callable[[_Worker], None]]] = [
            ("fetch", self._fetches, self._fetch_next),
            ("store", self._stores, self._store_next),
            ("promote", self._promotions, self._promote_next),
            ("write", self._writes, self._write_next),
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(queue, step), name=f"kv-{name}", daemon=True) for name, queue, step in work
        ]
        self._threads += [
            threading.Thread(target=self._run_loads, args=(lane,), name="kv-load", daemon=True) for lane in range(LANES)
        ]
        make_codec(codec, shape)  # raises here what it would raise on each thread
        for thread in self._threads:
            thread.start()

    # For the engine thread.

    def load(self, ticket: LoadTicket) -> None:
        """Starts a load."""
        with self._condition:
            self._loads.append(ticket)
            self._condition.notify_all()

    def fetch(self, ticket: LoadTicket) -> None:
        """Starts a load that nobody waits for yet; it goes on while no other one is under way. `finished` does not name it."""
        with self._condition:
            self._fetches.append(ticket)
            self._condition.notify_all()

    def computing(self, is_computing: bool) -> None:
        """A step begins, or has ended: while one runs, stores leave it nearly all of the processor."""
        self._is_computing = is_computing

    def store(self, filled: Sequence[Filled]) -> None:
        """Has full blocks stored, when there is time. The oldest are dropped when too many wait."""
        with self._condition:
            self._stores.extend(filled)
            while len(self._stores) > _MAX_STORES:
                self._stores.popleft()
                self.counts.dropped += 1
            self._condition.notify_all()

    def promote(self, digests: Sequence[BlockHash]) -> None:
        """Has blocks brought into host memory from below."""
        if self._host is None or not self._below:
            return
        missing = self._host.lacking(digests)
        with self._condition:
            self._promotions.extend(missing)
            while len(self._promotions) > _MAX_STORES:
                self._promotions.popleft()
            self._condition.notify_all()

    def finished(self) -> list[LoadTicket]:
        """Tickets that are done since the last call."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    @property
    def has_finished(self) -> bool:
        """True when `finished` would return something."""
        return bool(self._finished)

    def wait_idle(self, timeout: float) -> bool:
        """Waits until nothing is under way. False when that took longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._condition:
            while self._busy or self._loads or self._fetches or self._stores or self._writes or self._promotions:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
        return True

    def close(self, flush_seconds: float = 10.0) -> None:
        """Writes down what waits, as far as it gets in `flush_seconds`, and ends the threads. Idempotent."""
        if not self._closing:
            self.wait_idle(flush_seconds)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    # The threads.

    def _run(self, queue: deque[Any], step: Callable[[_Worker], None]) -> None:
        worker = _Worker(make_codec(self._codec, self._shape))
        while True:
            with self._condition:
                while not queue and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                self._busy += 1
            try:
                step(worker)
            except Exception:
                logger.exception("a transfer failed")
            finally:
                with self._condition:
                    self._busy -= 1
                    if not self._busy:
                        self._condition.notify_all()

    def _run_loads(self, lane: int) -> None:
        """Works at the load that is done soonest, together with the other loaders."""
        _keep_apart(lane)
        worker = _Worker(make_codec(self._codec, self._shape), lane)
        while True:
            with self._condition:
                while (ticket := self._next_load()) is None and not self._closing:
                    self._condition.wait()
                if ticket is None or self._closing:
                    return
                is_first = ticket.enter()
                self._busy += 1
            try:
                if is_first:
                    self._announce(ticket)
                self._load(ticket, worker)
            except Exception:
                logger.exception("a load failed")
                ticket.lacks(0)
            finally:
                self._loaded(ticket)

    def _next_load(self) -> LoadTicket | None:
        """The one with the fewest blocks left, or one that has waited for `_AGE` seconds. None: there is nothing to do."""
        open_ones = [ticket for ticket in self._loads if ticket.left or ticket.is_deserted]
        if not open_ones:
            return None
        oldest = open_ones[0]
        return oldest if time.monotonic() - oldest.made_at > _AGE else min(open_ones, key=lambda ticket: ticket.left)

    def _loaded(self, ticket: LoadTicket) -> None:
        """A loader leaves a ticket."""
        with self._condition:
            is_done = ticket.leave()
            if is_done:
                self._loads.remove(ticket)
                ticket.done = True
                self._finished.append(ticket)
        if is_done:
            self._on_done()
        with self._condition:
            self._busy -= 1
            self._condition.notify_all()

    def _fetch_next(self, worker: _Worker) -> None:
        ticket = _take(self._fetches)
        if ticket is None:
            return
        try:
            self._announce(ticket)
            self._load(ticket, worker, gives_way=True)
        finally:
            ticket.done = True
            self._on_done()

    def _let_loads_pass(self, ticket: LoadTicket) -> None:
        with self._condition:
            while any(not load.cancelled for load in self._loads) and not (ticket.cancelled or self._closing):
                self._condition.wait(_WAIT)

    def _announce(self, ticket: LoadTicket) -> None:
        """Tells the tier below what it will be asked for."""
        host = self._host
        if self._below:
            missing = [digest for digest in ticket.digests if host is None or not host.prefix((digest,))]
            if missing:
                self._below[0].ahead(missing)

    def _load(self, ticket: LoadTicket, worker: _Worker, *, gives_way: bool = False) -> None:
        device, host, lane = self._device, self._host, ticket.lanes[worker.lane]
        while (index := ticket.take()) is not None:
            if gives_way:
                self._let_loads_pass(ticket)
            digest, block = ticket.digests[index], ticket.blocks[index]
            name = None
            if host is not None:
                with lane:
                    if ticket.cancelled:
                        return
                    if self._load_from(host, digest, block, worker):
                        name = host.name
            if name is not None:
                self._promoted.pop(digest, None)
            else:
                # Not under the lock: a medium may take its time.
                tier = next((tier for tier in self._below if tier.load(digest, worker.staging)), None)
                if tier is None:
                    ticket.lacks(index)
                    return
                with lane:
                    if ticket.cancelled:
                        return
                    worker.codec.decode(worker.staging, device.target(block))
                    device.filled(block)
                name = tier.name
                if host is not None:
                    host.store((Outgoing(digest, worker.staging),))
            ticket.has(index, name)

    def _load_from(self, host: GuardedTier, digest: BlockHash, block: int, worker: _Worker) -> bool:
        target = self._device.target(block)
        if self._codec == "raw":
            if not host.load(digest, target):
                return False
        else:
            if not host.load(digest, worker.staging):
                return False
            worker.codec.decode(worker.staging, target)
        self._device.filled(block)
        return True

    def _store_next(self, worker: _Worker) -> None:
        batch: list[Filled] = []
        with self._condition:
            while self._stores and len(batch) < _STORE_BATCH:
                batch.append(self._stores.popleft())
        for filled in batch:
            began = time.thread_time()
            self._store_one(filled, worker)
            self._spare_steps(time.thread_time() - began)

    def _spare_steps(self, spent: float) -> None:
        """Waits after `spent` seconds of work so long that stores take a few percent of one core while a step runs, unless so
        many wait that blocks might be given up before they are stored."""
        until = time.monotonic() + min(spent * (1 / _STORE_SHARE - 1), _LONGEST_SPARING)
        with self._condition:
            while self._is_computing and len(self._stores) < self._backlog and not self._closing:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(left)

    def _store_one(self, filled: Filled, worker: _Worker) -> None:
        if not self._is_intact(filled):
            self.counts.stale += 1
        elif self._host is None or not self._host.prefix((filled.digest,)):  # else a sibling has stored it
            payload = worker.codec.encode(self._device.source(filled.block))
            if payload is None:
                self.counts.unfit += 1
            elif self._host is not None:
                self._store_in_host(self._host, filled, payload)
            else:
                self._stage(filled, payload)

    def _store_in_host(self, host: GuardedTier, filled: Filled, payload: Bytes) -> None:
        outgoing = Outgoing(filled.digest, payload, filled.depth, filled.session, lambda: self._is_intact(filled))
        if host.store((outgoing,)):
            self.counts.stored += 1
            if self._below:
                self._write_later(filled.digest, filled.depth, filled.session, None)
        else:
            self._stage(filled, payload)

    def _stage(self, filled: Filled, payload: Bytes) -> None:
        """Keeps a copy until it is written to the tiers below."""
        if not self._below or self._staged + len(payload) > _MAX_STAGED_BYTES:
            self.counts.dropped += 1
            return
        copy = payload.copy()
        if self._is_intact(filled):
            self._write_later(filled.digest, filled.depth, filled.session, copy)
        else:
            self.counts.stale += 1

    def _write_later(self, digest: BlockHash, depth: int, session: int, payload: Bytes | None) -> None:
        with self._condition:
            self._writes.append((digest, depth, session, payload))
            self._staged += 0 if payload is None else len(payload)
            while len(self._writes) > _MAX_WRITES:
                _, _, _, dropped = self._writes.popleft()
                self._staged -= 0 if dropped is None else len(dropped)
                self.counts.dropped += 1
            self._condition.notify_all()

    def _write_next(self, worker: _Worker) -> None:
        waiting = _take(self._writes)
        if waiting is None:
            return
        digest, depth, session, payload = waiting
        if payload is not None:
            with self._condition:
                self._staged -= len(payload)
        wanting = [tier for tier in self._below if tier.is_available and not tier.prefix((digest,))]
        if not wanting:
            return
        if payload is None:
            if self._host is None or not self._host.load(digest, worker.staging):
                return  # host memory was faster than the disk: it is gone
            payload = worker.staging
        for tier in wanting:
            self.counts.written += len(tier.store((Outgoing(digest, payload, depth, session),)))

    def _promote_next(self, worker: _Worker) -> None:
        digest = _take(self._promotions)
        host = self._host
        if digest is None or host is None or host.prefix((digest,)):
            return
        now = time.monotonic()
        while self._promoted and next(iter(self._promoted.values())) < now - _USEFUL_FOR:
            self._promoted.popitem(last=False)
            self.counts.useless += 1
        if any(tier.load(digest, worker.staging) for tier in self._below) and host.store((Outgoing(digest, worker.staging),)):
            self.counts.promoted += 1
            self._promoted[digest] = now

    def _is_intact(self, filled: Filled) -> bool:
        return self._generations[filled.block] == filled.generation


class _Worker:
    """What one thread has for itself."""

    def __init__(self, codec: Codec, lane: int = 0) -> None:
        self.codec = codec
        self.lane = lane
        self.staging: Bytes = np.empty(codec.encoded_bytes, dtype=np.uint8)


def _keep_apart(lane: int) -> None:
    """Gives the calling thread every `LANES`-th of the processors it may use. Loaders that are woken together are left on one
    of them by the kernel for longer than a load takes, and two then load no faster than one."""
    if not hasattr(os, "sched_setaffinity"):
        return
    own = sorted(os.sched_getaffinity(0))[lane::LANES]
    if own:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, own)


def _take(queue: deque[ItemT]) -> ItemT | None:
    """The next one; None when another thread was faster."""
    try:
        return queue.popleft()
    except IndexError:
        return None
