"""Which sessions are in progress, and whose turns wait at the door because their KV would displace that of others.

A session is in progress from its first turn on, until it is closed or has been away for longer than it was expected to be.
When the KV of all sessions in progress is more than device and tiers hold, each turn evicts what the next one comes back for,
and all of them are computed again and again. So:

- a turn of a session in progress goes at once;
- a turn of any other session waits at the door until what is there leaves room for it (`low`), the earliest session first;
- when those in progress outgrow the room (`high`), those that are cheapest to compute again, and are not being computed right
  now, pause: their blocks may go, and their next turns wait at the door. They come back before sessions that began later.
  The earliest session in progress never pauses.

What is kept for those who do not come back is kept for nothing, and most sessions of a chat service are one turn long. So a
session is in progress between two turns only as long as such sessions mostly do come back (`engine.session_returns`); and where
most new ones do not, nobody waits at the door but for room that somebody is away from.

Nobody starves, and lack of room is no reason to do nothing. Who is first at the door goes in regardless when `overtakes` turns
have passed since the last one did; when nothing is in progress; and when the engine is idle, and has been lately for as long as
it takes to compute again what has to go for it. Idleness is saved and spent: no more is lost by computing again than was lost
by doing nothing.

After Continuum (arXiv 2511.02230: program-level first come, first served; time to live from the expected return) and
ThunderAgent (arXiv 2602.13692: programs pause, those first that are cheapest to bring back, and resume with hysteresis).

Pure: it knows no engine, and time is given to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.session_returns import Returns
from prefix_cache.block_pool import IntegrityError
from prefix_cache.hashing import BlockHash

_LEAST_GRACE = 1.0
_BEYOND_P90 = 2.0
"""Who waits for longer than this many times what nine of ten do counts as gone, as in prefix_cache.expected_use."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """`low`, `high`: of what device and tiers hold: sessions begin and resume as long as they stay below `low`, and pause
    beyond `high`. `overtakes`: turns that pass before the first at the door goes in regardless. `patience`: seconds for which a
    session counts as in progress between two turns, at most, and where nobody says when it will be back. `most_idle`: seconds
    of idleness that are remembered."""

    low: float = 0.6
    high: float = 1.0
    overtakes: int = 64
    patience: float = 60.0
    most_idle: float = 10.0

    def __post_init__(self) -> None:
        """Raises ValueError, with a sentence."""
        if not 0 < self.low <= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; it must be 0 < low <= high.")
        if self.overtakes < 1:
            raise ValueError(f"overtakes is {self.overtakes}; it must be at least 1.")
        if not self.patience > 0 or not self.most_idle > 0:
            raise ValueError(f"patience is {self.patience} and most_idle {self.most_idle}; they must be positive.")


Rank = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that wants in. `session` is never 0. `rank`: lower goes first; no two turns have the same. `digests`: of the full
    blocks of its prompt. `more`: blocks that it will need beside those."""

    request_id: str
    session: int
    rank: Rank
    digests: Sequence[BlockHash]
    more: int = 0


@dataclass(slots=True)
class _Session:
    """A session in progress. `turns`: that were let in and have not ended; `begun`: those of them that are being computed.
    `until`: when it counts as gone while it is away. `pinned_until`: somebody asked for its KV to be kept so long.
    `is_fresh`: it came from the door, and no turn of it has ended since. `is_closed`: it goes with its last turn. `is_back`: it
    has been away before."""

    born: Rank
    digests: Sequence[BlockHash] = ()
    turns: dict[str, Turn] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    until: float = 0.0
    pinned_until: float = 0.0
    is_fresh: bool = True
    is_closed: bool = False
    is_back: bool = False


@dataclass(slots=True)
class DoorCounts:
    """Since the start. `held`: turns that waited at the door. `paused`, `resumed`: sessions. `overtaken`, `idle`: turns that
    went in although there was no room, since others had passed or the engine stood idle. `gone`: sessions that were not back
    in time. `unexpected`: sessions that were not waited for, since few like them come back."""

    held: int = 0
    paused: int = 0
    resumed: int = 0
    overtaken: int = 0
    idle: int = 0
    gone: int = 0
    unexpected: int = 0


class SessionDoor:
    """Belongs to the engine thread. Times are seconds of one clock; they never go back.

    capacity: blocks that device and tiers hold, asked anew each time. seconds_of: what computing blocks `first` to
    `last - 1` of a sequence again takes.
    """

    def __init__(self, config: DoorConfig, capacity: Callable[[], int], seconds_of: Callable[[int, int], float]) -> None:
        self.config = config
        self.counts = DoorCounts()
        self._capacity = capacity
        self._seconds_of = seconds_of
        self._sessions: dict[int, _Session] = {}
        self._paused: dict[int, float] = {}  # session -> when it is forgotten
        self._uses: dict[BlockHash, int] = {}
        self._waiting: list[Turn] = []
        self._by_id: dict[str, Turn] = {}
        self._returns = Returns()
        self._away = 0  # sessions in progress that have no turn here
        self._passed = 0  # turns since the last one that went in from the door
        self._idle = 0.0  # seconds without computing that nobody has made use of
        self._counted_to: float | None = None  # until when they are counted
        self._worked = 0.0  # seconds of computing since
        self._open = False
        self._next_end = float("inf")  # no session is gone before

    # What is there to see.

    @property
    def in_progress(self) -> int:
        """Sessions whose KV is kept for them."""
        return len(self._sessions)

    @property
    def paused(self) -> int:
        """Sessions that pause."""
        return len(self._paused)

    @property
    def used(self) -> int:
        """Blocks of all sessions in progress, shared ones counted once."""
        return len(self._uses)

    @property
    def waiting(self) -> Sequence[Turn]:
        """Turns at the door, in the order in which they will go."""
        return self._waiting

    def is_paused(self, session: int) -> bool:
        """True from when it pauses until it goes on or is forgotten."""
        return session in self._paused

    # What happens.

    def arrives(self, turn: Turn, now: float) -> bool:
        """True when the turn may go to the queue at once; else it waits here until `let_in` names it or it `leaves`."""
        self._expire(now)
        is_back = self._returns.arrives(turn.session, now)
        if turn.session in self._sessions:
            self._sessions[turn.session].is_back |= is_back
            self._enters(turn)
            return True
        insort(self._waiting, turn, key=_rank)
        self._by_id[turn.request_id] = turn
        if len(self._waiting) == 1:
            self._passed = 0
        if self._waiting[0] is turn and self._has_room(turn):
            self._goes(turn)
            return True
        self.counts.held += 1
        return False

    def let_in(self, now: float, *, idle: bool) -> list[Turn]:
        """Turns that may go to the queue now. `idle`: the engine has nothing to compute."""
        self._expire(now)
        self._count_idleness(now)
        went: list[Turn] = []
        while self._waiting and self._may_go(self._waiting[0], idle and not went, now):
            turn = self._waiting[0]
            self._goes(turn)
            went.append(turn)
        return went

    def due_in(self, now: float, *, idle: bool) -> float | None:
        """Seconds after which `let_in` should be asked again though nothing happens; None: never."""
        if not self._waiting:
            return None
        turn = self._waiting[0]
        if self._open or turn.session in self._sessions or self._has_room(turn) or self._passed >= self.config.overtakes:
            return 0.0
        due = self._next_end - now
        price = self._price(turn, now) if idle else None
        if price is not None:
            self._count_idleness(now)
            due = min(due, min(price, self.config.most_idle) - self._idle)
        return max(0.0, due)

    def worked(self, seconds: float) -> None:
        """The engine has computed for so long."""
        self._worked += seconds

    def began(self, session: int, request_id: str) -> None:
        """A turn of those that were let in is being computed."""
        known = self._sessions.get(session)
        if known is not None and request_id in known.turns:
            known.begun.add(request_id)

    def ended(self, session: int, request_id: str, digests: Sequence[BlockHash] | None, now: float) -> None:
        """A turn that was let in has ended, with these blocks; None: it was dropped."""
        known = self._sessions.get(session)
        if known is None or known.turns.pop(request_id, None) is None:
            return
        known.begun.discard(request_id)
        self._away += not known.turns
        if digests is not None:
            self._hold(known, digests)
            known.is_fresh = False
        self._stays(known, now + self.config.patience)
        # Who gave up before the first answer has nothing to come back for.
        given_up = digests is None and known.is_fresh and known.pinned_until <= now
        if not known.turns and (known.is_closed or given_up):
            self._forget(session)

    def leaves(self, request_id: str) -> bool:
        """A turn goes from the door because nobody wants its answer any more. False when it does not wait here."""
        turn = self._by_id.pop(request_id, None)
        if turn is None:
            return False
        del self._waiting[bisect_left(self._waiting, turn.rank, key=_rank)]
        return True

    def away(self, session: int, now: float, return_p90: float | None, *, called: bool) -> None:
        """A turn of the session was answered, and called tools or did not. It is back in so many seconds in nine of ten
        cases, as far as that is known."""
        known = self._sessions.get(session)
        if known is None or known.turns:
            return
        away = self.config.patience
        if return_p90 is not None:
            away = min(max(_BEYOND_P90 * return_p90, return_p90 + _LEAST_GRACE), away)
        # Who reads an answer is back late or never. Where all are back soon it is an agent that calls in text.
        is_soon = called or (return_p90 is not None and away < self.config.patience)
        kind = (called, known.is_back)
        if self._returns.leaves(session, kind, now + away, expects=is_soon) and is_soon:
            if return_p90 is not None:
                self._stays(known, now + away)
        elif known.pinned_until <= now:
            self.counts.unexpected += 1
            self._forget(session)

    def pinned(self, session: int, seconds: float, now: float) -> None:
        """Somebody asks for its KV to be kept for so long; 0: no longer than that of others."""
        known = self._sessions.get(session)
        if known is not None:
            known.pinned_until = now + seconds
            until = now + self.config.patience
            self._stays(known, until if seconds else min(known.until, until))

    def closed(self, session: int) -> None:
        """It will not be back. Turns of it that run or wait go on."""
        self._paused.pop(session, None)
        self._returns.forget(session)
        known = self._sessions.get(session)
        if known is None:
            return
        if known.turns:
            known.is_closed = True
        else:
            self._forget(session)

    def pause_overflow(self, now: float) -> tuple[list[int], list[Turn]]:
        """Sessions that pause now, since those in progress hold more than there is room for, and turns of them that were in the
        queue and are at the door again."""
        limit = self.config.high * self._capacity()
        if self._open or len(self._uses) <= limit:
            return [], []
        paused: list[int] = []
        back: list[Turn] = []
        for session in self._cheapest(now):
            if len(self._uses) <= limit:
                break
            back.extend(self._pause(session, now))
            paused.append(session)
        return paused, back

    def open(self) -> None:
        """Nobody waits any more, come what may: the replica takes no new turns, and finishes what it has."""
        self._open = True

    # How it is decided.

    def _may_go(self, turn: Turn, idle: bool, now: float) -> bool:
        if self._open or turn.session in self._sessions or self._has_room(turn):
            return True
        if self._passed >= self.config.overtakes:
            self.counts.overtaken += 1
            return True
        price = self._price(turn, now) if idle else None
        if price is not None and self._idle >= min(price, self.config.most_idle):
            self._idle = max(0.0, self._idle - price)
            self.counts.idle += 1
            return True
        return False

    def _has_room(self, turn: Turn) -> bool:
        if not self._sessions:
            return True
        share = self.config.low
        if not self._returns.are_likely:
            if not self._away:
                return True
            share = self.config.high  # it will not grow
        return len(self._uses) + self._needs(turn) <= share * self._capacity()

    def _needs(self, turn: Turn) -> int:
        """Blocks of it that no session in progress has. Names are chained, so those it shares come first."""
        return len(turn.digests) - _held(turn.digests, self._uses, 1) + turn.more

    def _price(self, turn: Turn, now: float) -> float | None:
        """Seconds of computing again what must go to make room for a turn; None when that cannot be."""
        missing = len(self._uses) + self._needs(turn) - self.config.high * self._capacity()
        price = 0.0
        for session in self._cheapest(now):
            if missing <= 0:
                return price
            first, last = self._own(session)
            missing -= last - first
            price += self._seconds_of(first, last)
        return price if missing <= 0 else None

    def _own(self, session: int) -> tuple[int, int]:
        """Its blocks from the first one on that nobody else in progress has."""
        digests = self._sessions[session].digests
        return _held(digests, self._uses, 2), len(digests)

    def _cheapest(self, now: float) -> list[int]:
        """Sessions that could pause, the cheapest to bring back first, among equals the one that is back last; pinned ones
        after all others. Not among them: the earliest one, and those that have not had their turn."""
        if len(self._sessions) < 2:
            return []
        eldest = min(self._sessions, key=lambda session: self._sessions[session].born)
        able = [
            (known.pinned_until > now, self._seconds_of(*self._own(session)), -known.until, session)
            for session, known in self._sessions.items()
            if not known.begun and not known.is_fresh and session != eldest
        ]
        return [session for _, _, _, session in sorted(able)]

    # The books.

    def _goes(self, turn: Turn) -> None:
        """From the door into the queue."""
        self.leaves(turn.request_id)
        if turn.session not in self._sessions:
            self._sessions[turn.session] = _Session(turn.rank)
            self._away += 1
            if self._paused.pop(turn.session, None) is not None:
                self.counts.resumed += 1
        self._enters(turn)
        self._passed = 0

    def _count_idleness(self, now: float) -> None:
        if self._counted_to is not None:
            idle = now - self._counted_to - self._worked
            self._idle = min(self._idle + max(idle, 0.0), self.config.most_idle)
        self._counted_to, self._worked = now, 0.0

    def _enters(self, turn: Turn) -> None:
        known = self._sessions[turn.session]
        self._away -= not known.turns
        known.turns[turn.request_id] = turn
        known.born = min(known.born, turn.rank)
        known.is_closed = False
        self._hold(known, turn.digests)
        if self._waiting:
            self._passed += 1

    def _stays(self, known: _Session, until: float) -> None:
        known.until = max(until, known.pinned_until)
        self._next_end = min(self._next_end, known.until)

    def _pause(self, session: int, now: float) -> Iterable[Turn]:
        known = self._sessions[session]
        back = list(known.turns.values())
        for turn in back:
            insort(self._waiting, turn, key=_rank)
            self._by_id[turn.request_id] = turn
        self._forget(session)
        until = self._paused[session] = max(known.until, now) + self.config.patience
        self._next_end = min(self._next_end, until)
        self.counts.paused += 1
        return back

    def _expire(self, now: float) -> None:
        """Sessions that are not back in time make room for others."""
        if now < self._next_end:
            return
        gone = [session for session, known in self._sessions.items() if not known.turns and known.until <= now]
        for session in gone:
            self._forget(session)
        self.counts.gone += len(gone)
        waiting = {turn.session for turn in self._waiting}
        for session in [one for one, until in self._paused.items() if until <= now and one not in waiting]:
            del self._paused[session]
        away = (known.until for known in self._sessions.values() if not known.turns)
        self._next_end = min(
            (*away, *(until for one, until in self._paused.items() if one not in waiting)), default=float("inf")
        )

    def _forget(self, session: int) -> None:
        known = self._sessions.pop(session)
        self._away -= not known.turns
        self._hold(known, ())

    def _hold(self, known: _Session, digests: Sequence[BlockHash]) -> None:
        """The session's blocks are these from now on."""
        uses = self._uses
        common = common_blocks(known.digests, digests)
        for digest in known.digests[common:]:
            if uses[digest] == 1:
                del uses[digest]
            else:
                uses[digest] -= 1
        for digest in digests[common:]:
            uses[digest] = uses.get(digest, 0) + 1
        known.digests = digests[:]  # as they are now: the chain of a sequence grows

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books balance."""
        uses: dict[BlockHash, int] = {}
        for known in self._sessions.values():
            for digest in known.digests:
                uses[digest] = uses.get(digest, 0) + 1
            if not known.begun <= known.turns.keys():
                raise IntegrityError("a turn is computed that was not let in")
        if uses != self._uses:
            raise IntegrityError("blocks are counted for sessions that do not have them")
        if self._away != sum(not known.turns for known in self._sessions.values()):
            raise IntegrityError("sessions are away that are here")
        if [turn.rank for turn in self._waiting] != sorted(turn.rank for turn in self._by_id.values()):
            raise IntegrityError("who waits at the door is not who came")
        if self._paused.keys() & self._sessions.keys():
            raise IntegrityError("a session is in progress and pauses")


def common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """How many blocks both begin with: a bisection, since names of blocks are chained."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _held(digests: Sequence[BlockHash], uses: dict[BlockHash, int], least: int) -> int:
    """How many of the first blocks are used by `least` sessions or more; a bisection likewise."""
    return bisect_left(range(len(digests)), True, key=lambda at: uses.get(digests[at], 0) < least)


def _rank(turn: Turn) -> Rank:
    return turn.rank
