"""Which turn a request belongs to: a new one, or one that is still running (or has just ended) for an earlier try of it.

A request is another try of a turn when it has the same body, `stream` and `stream_options` aside, and

- the same Idempotency-Key, or
- neither has such a key, and both name the same session by a source that names one conversation. Sources that many
  conversations may share (a job, a routing key, a prompt cache key) do not count, and without a name nothing is merged:
  two strangers who say the same want two answers.

That holds for sampled turns too. One agent has one next turn; a caller that wants several samples of it asks for `n`, gives
each an Idempotency-Key of its own, or a seed. Nothing is looked up across tenants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import xxhash

from gateway.apis.codec import Answer, AnswerIdentity
from gateway.turn import SessionRef, TurnError
from gateway.turns.config import TurnsConfig
from gateway.turns.kept_events import EventBudget
from gateway.turns.reader import Reader
from gateway.turns.shared import Settle, SharedTurn, Start
from sessions.identity import GROUPING_SOURCES, SOURCES, bounded_key

IDEMPOTENCY_KEY = "Idempotency-Key"

How = Literal["running", "finished"]
_ENTRY_BYTES = 4000
_ID_BYTES = 40
_DELIVERY = ("stream", "stream_options")
_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Entry:
    """A turn that retries may find. `body` while it runs, `digest` when it is kept after its end."""

    key: _Key
    keyed: bool
    shared: SharedTurn
    answer: AnswerIdentity
    request_id: str
    body: Mapping[str, Any] | None
    told: bool = False
    digest: bytes = b""
    expires_at: float = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class Joined:
    """A request's part in a turn. `how` None: it began the turn; else `first` is the id of the request that did."""

    reader: Reader
    answer: AnswerIdentity
    first: str
    how: How | None = None
    refused: bool = False
    _entry: _Entry | None = field(default=None, repr=False)

    def tell_once(self) -> bool:
        """True for the first request that got the whole answer: records and counts of the generation are made then."""
        if self._entry is None:
            return True
        told, self._entry.told = self._entry.told, True
        return not told


class TurnRegistry:
    """The turns of one gateway process. Use on one event loop."""

    def __init__(self, config: TurnsConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._budget = EventBudget(config.max_total_bytes)
        self._running: dict[_Key, list[_Entry]] = {}
        self._finished: OrderedDict[_Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Turns that can be found: running ones and kept answers."""
        return sum(map(len, self._running.values())) + len(self._finished)

    def join(
        self,
        *,
        session: SessionRef,
        idempotency_key: str | None,
        body: Mapping[str, Any],
        request_id: str,
        answer: Answer,
        stream: bool,
        start: Start,
        settle: Settle,
    ) -> Joined:
        """The turn that the request is part of; `start`, and `settle` in the end, are called when it is a new one.

        Raises TurnError 422 for an Idempotency-Key that came with another body before.
        """
        key = self._key(session, idempotency_key, answer.dialect)
        refused = False
        if key is not None:
            found = self._find(key, body, stream)
            if found is not None:
                entry, how = found
                refused = stream and not entry.shared.whole
                if not refused:
                    return Joined(entry.shared.read(), entry.answer, entry.request_id, how, _entry=entry)
        shared = SharedTurn(start, settle, budget=self._budget, max_bytes=self._config.max_turn_bytes, keep=key is not None)
        joined = Joined(shared.read(), answer.identity, request_id, refused=refused)
        if key is not None:
            entry = _Entry(key, idempotency_key is not None, shared, answer.identity, request_id, body)
            joined._entry = entry
            self._running.setdefault(key, []).append(entry)
        return joined

    async def leave(self, joined: Joined) -> None:
        """A request is done with its turn, for whatever reason. Returns when a generation that nobody reads has ended."""
        entry = joined._entry
        try:
            await joined.reader.aclose()
        finally:
            if entry is not None and entry.shared.readers == 0:
                self._retire(entry)

    def _key(self, session: SessionRef, idempotency_key: str | None, dialect: str) -> _Key | None:
        if not self._config.attach:
            return None
        if idempotency_key is not None:
            return session.tenant, dialect, "key", bounded_key(idempotency_key)
        if session.key is None or session.source not in SOURCES or session.source in GROUPING_SOURCES:
            return None
        return session.tenant, dialect, "session", session.key

    def _find(self, key: _Key, body: Mapping[str, Any], stream: bool) -> tuple[_Entry, How] | None:
        too_far: _Entry | None = None
        for entry in self._running.get(key, ()):
            if entry.shared.failed:
                continue
            if entry.body is not None and _same(entry.body, body):
                if entry.shared.whole or not stream:
                    return entry, "running"
                # An earlier try that was refused this one has begun the turn again, maybe.
                too_far = entry
            elif entry.keyed:
                raise _reused()
        if too_far is not None:
            return too_far, "running"
        self._expire()
        kept = self._finished.get(key)
        if kept is None:
            return None
        if kept.digest != _digest(body):
            raise _reused()
        return kept, "finished"

    def _retire(self, entry: _Entry) -> None:
        running = self._running.get(entry.key)
        if running is None or entry not in running:
            return
        running.remove(entry)
        if not running:
            del self._running[entry.key]
        body, entry.body = entry.body, None
        keep = entry.keyed and entry.shared.complete and entry.shared.whole and body is not None
        if not keep or self._config.max_answers == 0 or self._config.answer_ttl == 0:
            entry.shared.forget()
            return
        entry.digest = _digest(body or {})
        entry.shared.slim()
        # What was said is held twice, as events and as the whole, and ids of prompts beside it.
        entry.nbytes = _ENTRY_BYTES + entry.shared.bytes + _ID_BYTES * _count(entry.answer.prompt_ids)
        self._budget.free -= entry.nbytes
        entry.expires_at = self._clock() + self._config.answer_ttl
        replaced = self._finished.pop(entry.key, None)
        if replaced is not None:
            self._drop(replaced)
        self._finished[entry.key] = entry
        self._expire()

    def _expire(self) -> None:
        """All live as long, so the oldest go first."""
        now = self._clock()
        while self._finished:
            oldest = next(iter(self._finished.values()))
            if oldest.expires_at > now and len(self._finished) <= self._config.max_answers and self._budget.free >= 0:
                return
            self._finished.popitem(last=False)
            self._drop(oldest)

    def _drop(self, entry: _Entry) -> None:
        entry.shared.forget()
        self._budget.free += entry.nbytes


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The request's Idempotency-Key; None without one."""
    return headers.get(IDEMPOTENCY_KEY, "").strip() or None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Equal but for how the answer is delivered. A memory compare: no digest is made of turns that nobody retries."""
    if one is other:
        return True
    names = (one.keys() | other.keys()).difference(_DELIVERY)
    return all(name in one and name in other and one[name] == other[name] for name in names)


def _count(ids: Sequence[Any]) -> int:
    return sum(len(item) if isinstance(item, list) else 1 for item in ids)


def _digest(body: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in body.items() if name not in _DELIVERY}
    return xxhash.xxh3_128_digest(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS))


def _reused() -> TurnError:
    return TurnError(
        422,
        "idempotency_key_reused",
        f"This {IDEMPOTENCY_KEY} came with another body before. Use a new key for a new request.",
        param=IDEMPOTENCY_KEY,
    )
