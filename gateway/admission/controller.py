"""Admission: a turn gets a ticket when some worker has room for it, in fair order, or is told when to come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.access.entries import PRIORITY_CLASSES, PriorityClass
from gateway.admission.config import AdmissionConfig
from gateway.admission.drain import DrainMeter
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.rooms import Rooms, SomeRoom, WorkerRoom, choose
from gateway.turn import TurnError

Shed = Literal["queue_full", "share_exceeded", "queue_timeout", "too_long_a_wait"]

# Rooms change by what others do, of which nobody tells.
_LOOK_EVERY = 0.1
_MAX_MODELS = 1024


class Ask(NamedTuple):
    """A turn that wants to begin. `needs`: blocks of KV for each of its prompts, answers included. `tokens`: of its prompts.
    `cost`: tokens of work that it is. `continuing`: its session is in progress."""

    model: str
    tenant: str
    needs: tuple[int, ...]
    tokens: int
    cost: float
    priority: PriorityClass = "normal"
    continuing: bool = False


@dataclass(eq=False, slots=True)
class _Turn(Waiting):
    needs: tuple[int, ...] = ()
    since: float = 0.0
    granted: asyncio.Future[None] | None = None
    booked: list[tuple[str, int]] = field(default_factory=list)


class Ticket:
    """A turn that may begin. `going` when its prompts are about to be put on workers, before anybody else is asked anything;
    `placed` when they are there, and the workers count them; `release` when it has ended, whatever came of it. All may be
    called more than once. `waited`: seconds."""

    __slots__ = ("_controller", "_model", "_open", "_turn", "waited")

    def __init__(self, controller: Admission, model: str, turn: _Turn, waited: float) -> None:
        self._controller = controller
        self._model = model
        self._turn: _Turn | None = turn
        self._open = True
        self.waited = waited

    def going(self) -> None:
        self._controller._going.append(self)

    def placed(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._controller._unbook(self._model, turn)

    def release(self) -> None:
        self.placed()
        if self._open:
            self._open = False
            self._controller._released(self._model)


class _Queue:
    """What one model's turns wait in. `booked`: blocks and requests that were granted and are not on their workers yet."""

    def __init__(self, config: AdmissionConfig) -> None:
        self.fair: FairQueue[_Turn] = FairQueue(config.queue_size, config.max_queued_tokens, config.weight)
        self.meter = DrainMeter()
        self.booked: dict[str, list[int]] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.pumping = False


class Admission:
    """One for a gateway. Use on one event loop. `sheds` counts (reason, kind of turn) since the start."""

    def __init__(
        self,
        config: AdmissionConfig,
        rooms: Rooms,
        *,
        some_room: SomeRoom = lambda model: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._rooms = rooms
        self._some_room = some_room
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        # Whoever asks next finds these on their workers: seldom more than one.
        self._going: list[Ticket] = []
        self.in_flight = 0
        self.sheds: Counter[tuple[Shed, str]] = Counter()

    def check(self, model: str, tenant: str, priority: PriorityClass) -> None:
        """Raises TurnError for a first turn that would only be turned away later, before anything is done for it."""
        queue = self._queues.get(model)
        if queue is None or not len(queue.fair):
            return
        self._check_wait(queue, tenant, priority)

    async def admit(self, ask: Ask) -> Ticket:
        """Waits until the turn may begin. Raises TurnError 429, 503 with the time after which to try again. Cancelling it
        leaves the queue."""
        self._arrived()
        queue = self._queue(ask.model)
        now = self._clock()
        turn = _Turn(ask.tenant, ask.priority, ask.continuing, ask.tokens, ask.cost, ask.needs, now)
        if not len(queue.fair):
            likely = self._some_room(ask.model)
            if likely is not None:
                if queue.booked:
                    for blocks in queue.booked.get(likely.name, ()):
                        likely.reserve(blocks)
                if self._grant(queue, turn, [likely]):
                    return self._ticket(ask.model, turn, 0.0)
            rooms = self._room(ask.model, queue)
            # Without any worker the dispatcher says what there is to say.
            if not rooms or self._grant(queue, turn, rooms):
                return self._ticket(ask.model, turn, 0.0)
        elif not ask.continuing:
            self._check_wait(queue, ask.tenant, ask.priority)
        turn.granted = asyncio.get_running_loop().create_future()
        others = len(queue.fair.tenants(ask.priority).keys() - {ask.tenant}) > 0
        for dropped in queue.fair.push(turn):
            own = others if dropped is turn else len(queue.fair.tenants(dropped.priority).keys() - {dropped.tenant}) > 0
            self._drop(queue, dropped, own_share=own)
        self._note_waiting(queue, now)
        self._pump(ask.model, queue)
        try:
            async with asyncio.timeout(self._patience(ask)):
                await turn.granted
        except TimeoutError:
            if turn.booked:
                # It was granted in the last moment.
                return self._ticket(ask.model, turn, self._clock() - now)
            self._gone(ask.model, queue, turn)
            raise self._shed(queue, turn, "queue_timeout") from None
        except (asyncio.CancelledError, TurnError):
            self._gone(ask.model, queue, turn)
            raise
        return self._ticket(ask.model, turn, self._clock() - now)

    def freed(self) -> None:
        """A worker may have room that it had not."""
        for model, queue in self._queues.items():
            if len(queue.fair) and not queue.pumping:
                queue.pumping = True
                asyncio.get_running_loop().call_soon(self._pump, model, queue)

    def depths(self) -> Mapping[PriorityClass, int]:
        """Turns that wait, by class."""
        return {name: sum(queue.fair.depth(name) for queue in self._queues.values()) for name in PRIORITY_CLASSES}

    def queued_tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(queue.fair.tokens for queue in self._queues.values())

    def tenants(self) -> Mapping[str, int]:
        """How many turns wait, by tenant."""
        counts: Counter[str] = Counter()
        for queue in self._queues.values():
            for name in PRIORITY_CLASSES:
                counts.update(queue.fair.tenants(name))
        return counts

    def _arrived(self) -> None:
        """Those that were going are there."""
        while self._going:
            self._going.pop().placed()

    def _queue(self, model: str) -> _Queue:
        queue = self._queues.get(model)
        if queue is None:
            if len(self._queues) >= _MAX_MODELS:
                for name in [name for name, known in self._queues.items() if not len(known.fair) and not known.booked]:
                    del self._queues[name]
            queue = self._queues[model] = _Queue(self.config)
        return queue

    def _patience(self, ask: Ask) -> float:
        return self.config.session_queue_timeout if ask.continuing else self.config.queue_timeout

    def _room(self, model: str, queue: _Queue) -> list[WorkerRoom]:
        rooms = list(self._rooms(model))
        for room in rooms:
            for blocks in queue.booked.get(room.name, ()):
                room.reserve(blocks)
        return rooms

    def _grant(self, queue: _Queue, turn: _Turn, rooms: list[WorkerRoom]) -> bool:
        found = choose(rooms, turn.needs, continuing=turn.continuing)
        if found is None:
            return False
        turn.booked = [(room.name, blocks) for room, blocks in found]
        for name, blocks in turn.booked:
            queue.booked.setdefault(name, []).append(blocks)
        return True

    def _pump(self, model: str, queue: _Queue) -> None:
        queue.pumping = False
        self._arrived()
        rooms: list[WorkerRoom] | None = None
        while (turn := queue.fair.head()) is not None:
            if rooms is None:
                rooms = self._room(model, queue)
            if not rooms or not self._grant(queue, turn, rooms):
                break
            queue.fair.take(turn)
            now = self._clock()
            queue.meter.granted(turn.cost, now)
            if turn.granted is not None and not turn.granted.done():
                turn.granted.set_result(None)
        self._note_waiting(queue, self._clock())
        if queue.timer is not None:
            queue.timer.cancel()
            queue.timer = None
        if len(queue.fair):
            queue.timer = asyncio.get_running_loop().call_later(_LOOK_EVERY, self._pump, model, queue)

    def _note_waiting(self, queue: _Queue, now: float) -> None:
        queue.meter.waiting(len(queue.fair) > 0, now)

    def _ticket(self, model: str, turn: _Turn, waited: float) -> Ticket:
        self.in_flight += 1
        return Ticket(self, model, turn, waited)

    def _gone(self, model: str, queue: _Queue, turn: _Turn) -> None:
        """Its client left, or it was dropped: it neither waits nor holds anything."""
        queue.fair.remove(turn)
        if turn.granted is not None and turn.granted.done() and not turn.granted.cancelled():
            turn.granted.exception()
        self._unbook(model, turn)
        # Who comes next may need less room.
        self._pump(model, queue)

    def _unbook(self, model: str, turn: _Turn) -> None:
        queue = self._queues.get(model)
        booked, turn.booked = turn.booked, []
        for name, blocks in booked:
            if queue is not None and name in queue.booked:
                queue.booked[name].remove(blocks)
                if not queue.booked[name]:
                    del queue.booked[name]

    def _released(self, model: str) -> None:
        self.in_flight -= 1
        self.freed()

    # Turning away

    def _check_wait(self, queue: _Queue, tenant: str, priority: PriorityClass) -> None:
        """Raises TurnError where a first turn would wait in vain."""
        now = self._clock()
        ahead = queue.fair.ahead_of(tenant, priority, continuing=False)
        seconds = queue.meter.seconds(ahead, now)
        if seconds is not None and seconds > self.config.queue_timeout:
            self.sheds["too_long_a_wait", "birth"] += 1
            raise TurnError(
                503,
                "overloaded",
                f"All workers are busy, and a new session would wait for about {seconds:.0f} seconds, longer than the "
                f"{self.config.queue_timeout:g} that it may. Try again later.",
                retry_after=self._bounded(seconds - self.config.queue_timeout / 2),
            )

    def _drop(self, queue: _Queue, dropped: _Turn, *, own_share: bool) -> None:
        error = self._shed(queue, dropped, "share_exceeded" if own_share else "queue_full")
        if dropped.granted is not None and not dropped.granted.done():
            dropped.granted.set_exception(error)

    def _shed(self, queue: _Queue, turn: _Turn, reason: Shed) -> TurnError:
        self.sheds[reason, "turn" if turn.continuing else "birth"] += 1
        ahead = queue.fair.ahead_of(turn.tenant, turn.priority, continuing=turn.continuing)
        seconds = queue.meter.seconds(ahead, self._clock())
        retry_after = self._bounded(seconds if seconds is not None else 1.0)
        if reason == "share_exceeded":
            return TurnError(
                429,
                "share_exceeded",
                "This tenant has more turns waiting than any other, and the queue is full. Send fewer at once, and try again "
                "after the time in Retry-After.",
                retry_after=retry_after,
            )
        if reason == "queue_full":
            message = f"All workers are busy and {len(queue.fair)} turns wait already. Try again later."
        else:
            message = f"No worker had room within {self._clock() - turn.since:.0f} seconds. Try again later."
        return TurnError(503, "overloaded" if reason == "queue_full" else "queue_timeout", message, retry_after=retry_after)

    def _bounded(self, seconds: float) -> float:
        return float(min(max(math.ceil(seconds), 1), self.config.max_retry_after))
