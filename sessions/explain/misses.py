"""What is remembered of misses, and the advice that follows from those that repeat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sessions.explain.causes import Cause
from sessions.explain.conversation import Conversation, RememberedText, dump, dump_head

REPEATS = 2
"""Misses of one kind in one place, from which on they are advised about."""

_FIXES: Mapping[str, str] = {
    "timestamp": "a time at {path} changes with every turn; move it to the end of the conversation, or send it only once",
    "uuid": "an identifier at {path} changes with every turn; leave it out, or move it to the end of the conversation",
    "counter": "a number at {path} changes with every turn; leave it out, or move it to the end of the conversation",
    "system_changed": "the text at {path} is written anew every turn; say what changes in a later message instead",
    "tools_reordered": "the tools come in another order every turn; sort them",
    "tools_added": "tools are added while the session runs; declare all of them from the first turn on",
    "tools_removed": "tools are taken away while the session runs; keep them, and use tool_choice to allow fewer",
    "tools_changed": "the tool at {path} is described anew every turn; describe it the same way each time",
    "settings_changed": "{path} changes from turn to turn; keep it as long as the session lasts",
    "arguments_reserialised": "arguments of past calls come back written otherwise ({path}); send them back as received",
    "reasoning_dropped": "reasoning is dropped from past answers ({path}); send it back as long as the tools of one task run",
}


class Miss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn that reused less than its predecessor left.

    `at`: Unix seconds. `path`, `message`, `field_bytes`, `before`, `after`: as of sessions.explain.causes.Difference ("" and
    None where the text is not known, or the prompt is the same). `text_bytes` and `tokens`: where in the prompt the shared
    prefix ends. `lost_tokens`: of this prompt, computed again though the predecessor had as many: never more than the prompt
    has behind the shared prefix, nor than was not cached. `lost_seconds`: what that took, estimated; None where nothing was
    measured yet.
    """

    request_id: str
    at: float
    cause: Cause
    path: str = ""
    message: int | None = None
    field_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    lost_tokens: int = 0
    lost_seconds: float | None = None
    before: str = ""
    after: str = ""
    worker: str = ""
    previous_worker: str = ""


class Advice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What would have spared `times` misses, and how much a turn it would save: tokens, and seconds where known."""

    cause: Cause
    path: str
    times: int
    text: str
    saved_tokens_per_turn: int
    saved_seconds_per_turn: float | None = None


def advice_from(misses: Sequence[Miss]) -> list[Advice]:
    """From misses that repeat in one place; the costliest first."""
    alike: OrderedDict[tuple[Cause, str], list[Miss]] = OrderedDict()
    for miss in misses:
        if miss.cause in _FIXES:
            path = "" if miss.cause.startswith("tools_") and miss.cause != "tools_changed" else _place(miss)
            alike.setdefault((miss.cause, path), []).append(miss)
    found = []
    for (cause, path), group in alike.items():
        if len(group) < REPEATS:
            continue
        tokens = sum(miss.lost_tokens for miss in group) // len(group)
        seconds = [miss.lost_seconds for miss in group if miss.lost_seconds is not None]
        saved = sum(seconds) / len(seconds) if seconds else None
        text = _FIXES[cause].format(path=path or "tools") + f" (saves about {tokens} tokens of prefill a turn)"
        found.append(Advice(cause, path, len(group), text, tokens, saved))
    return sorted(found, key=lambda advice: -advice.saved_tokens_per_turn * advice.times)


def _place(miss: Miss) -> str:
    """Where misses count as alike: a place at the top stays where it is, one in the history moves on with it."""
    if miss.message is None or miss.message == 0:
        return miss.path
    return "messages[*]" + miss.path.partition("]")[2]


class Place(NamedTuple):
    """A worker: its gateway's name for it, and its own instance id, "" where that is not known."""

    worker: str = ""
    instance: str = ""

    def is_other(self, place: Place) -> bool:
        """Whether `place` is another worker than this. The names of two gateways say nothing to each other, and a worker
        that was started anew has its name still and its blocks no more. What is not known is not another."""
        if self.instance and place.instance:
            return self.instance != place.instance
        return bool(self.worker and place.worker) and self.worker != place.worker


@dataclass(slots=True)
class Left:
    """What the last turn that was answered left: tokens, and where. Of `tokens` a later turn that was not answered may have
    kept fewer."""

    tokens: int
    place: Place


@dataclass(slots=True)
class _Session:
    text: RememberedText | None = None
    left: Left | None = None
    misses: list[Miss] = field(default_factory=list)
    nbytes: int = 0


_MISS_BYTES = 700


class MissLog:
    """By (tenant, session): the text of the last turn, and the last misses. Bounded by bytes, least recently used out first.
    Use on one thread."""

    def __init__(self, max_bytes: int, *, misses_per_session: int = 32) -> None:
        self._max_bytes = max_bytes
        self._per_session = misses_per_session
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._sessions)

    def previous(self, tenant: str, session: str) -> Conversation | None:
        """The last turn of the session, where its text is still known."""
        known = self._sessions.get((tenant, session))
        return None if known is None or known.text is None else known.text.conversation()

    def go_on(self, tenant: str, session: str, messages: Sequence[Mapping[str, Any]], kept: int) -> bool:
        """The session's turn has `messages`, of which `kept`, and tools and settings, are those of the turn before it. False
        where that one's text is not known: it is to be remembered whole."""
        at = (tenant, session)
        known = self._sessions.get(at)
        if known is None or known.text is None or not 0 < kept <= len(known.text.messages):
            return False
        known.text.go_on(kept, [dump(message) for message in messages[kept:]])
        self._put(at, known)
        return True

    def remember(self, tenant: str, session: str, turn: Conversation, kept: int) -> None:
        """The session's turn, of which `kept` messages (and, where there are any, tools and settings) are those of the turn
        before it."""
        if self.go_on(tenant, session, turn.messages, kept):
            return
        at = (tenant, session)
        known = self._sessions.get(at)
        text = RememberedText(dump_head(turn), [dump(message) for message in turn.messages])
        session_text = known if known is not None else _Session()
        session_text.text = text
        self._put(at, session_text)

    def left(self, tenant: str, session: str) -> Left | None:
        """What the session's last answered turn left; None where that is not known."""
        known = self._sessions.get((tenant, session))
        return None if known is None else known.left

    def answered(self, tenant: str, session: str, answer: Mapping[str, Any], left: Left) -> None:
        """The session's turn was answered so."""
        known = self._sessions.get((tenant, session))
        if known is not None and known.text is not None:
            known.left = left
            known.text.go_on(len(known.text.messages), [dump(answer)])
            self._put((tenant, session), known)

    def add(self, tenant: str, session: str, miss: Miss) -> None:
        """One more miss of the session."""
        known = self._sessions.get((tenant, session)) or _Session()
        known.misses.append(miss)
        if len(known.misses) > self._per_session:
            del known.misses[0]
        self._put((tenant, session), known)

    def misses(self, tenant: str, session: str) -> tuple[Miss, ...]:
        """The session's last misses, the oldest first."""
        known = self._sessions.get((tenant, session))
        return () if known is None else tuple(known.misses)

    def forget(self, tenant: str, session: str) -> None:
        """The session is over."""
        known = self._sessions.pop((tenant, session), None)
        if known is not None:
            self._bytes -= known.nbytes

    def _put(self, at: tuple[str, str], session: _Session) -> None:
        size = 500 + _MISS_BYTES * len(session.misses) + (session.text.nbytes if session.text is not None else 0)
        self._bytes += size - session.nbytes
        session.nbytes = size
        self._sessions[at] = session
        self._sessions.move_to_end(at)
        while self._bytes > self._max_bytes and self._sessions:
            oldest, dropped = self._sessions.popitem(last=False)
            self._bytes -= dropped.nbytes
            if oldest == at:
                return
