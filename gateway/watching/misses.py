"""Turns that reused less than their predecessors left, and why.

The ledger says where a prompt parts from its predecessor's; the texts, where they are still known, say what changed there.
Where the prompt is the same and the replica had not the blocks, it was another replica, or they were evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.histories.keeper import TurnHistory
from gateway.rendering import tool_dict
from gateway.running import Usage
from gateway.turn import Turn
from gateway.watching.config import MissesConfig
from prefix_cache.hashing import list_tokens
from sessions.continuation import Divergence
from sessions.digests import DIGEST_BYTES, message_digest
from sessions.explain.causes import Cause, Difference, first_difference
from sessions.explain.conversation import Conversation
from sessions.explain.misses import Left, Miss, MissLog, Place
from sessions.ledger import Ledger

_RATE_KEEPS = 0.95
_UNKNOWN_TEXT: Mapping[str, Cause] = {
    "message": "history_edited",
    "shorter": "truncated",
    "template": "template",
    "generated": "history_edited",
    "context": "settings_changed",
}


@dataclass(slots=True)
class WatchedMiss:
    """A turn's miss, as far as it is known. `prompt_tokens`: of the turn; `expected`: tokens that its replica should find in
    its cache where the prompt is its predecessor's, left at `previous`."""

    tenant: str
    session: str
    request_id: str
    model: str
    prompt_tokens: int = 0
    expected: int = 0
    block_size: int = 1
    previous: Place = field(default_factory=Place)
    miss: Miss | None = None
    settled: bool = False


@dataclass(slots=True)
class _Rate:
    """Seconds of prefill a token, the last turns counting most."""

    seconds: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class MissExplainer:
    """Use on one event loop. `found` is told of each miss once; `decode` gives the text of token ids of a model."""

    config: MissesConfig
    found: Callable[[Miss], None]
    decode: Callable[[str, Sequence[int]], str]
    clock: Callable[[], float] = time.time
    log: MissLog = field(init=False)
    _rates: dict[str, _Rate] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.log = MissLog(self.config.max_bytes, misses_per_session=self.config.per_session)

    def began(self, turn: Turn, history: TurnHistory) -> WatchedMiss:
        """A turn's prompt is made."""
        made = history.continuation
        watched = WatchedMiss(history.tenant, history.key, turn.request_id, history.model, made.ledger.num_tokens)
        watched.block_size = made.ledger.block_size
        if not self.config.explain:
            return watched
        own = history.foreign is None and history.record is not None
        divergence = _divergence(history) if own else None
        left = self.log.left(history.tenant, history.key)
        if left is not None:
            left.tokens = min(left.tokens, made.reused_tokens) if own and history.position == 0 else 0
        # What the predecessor had and this turn has not is no loss: nobody computes it again.
        lost = min(divergence.lost_tokens, made.ledger.num_tokens - divergence.tokens) if divergence is not None else 0
        if divergence is not None and lost >= made.ledger.block_size:
            watched.miss = self._diverged(turn, history, divergence, lost)
            old = _predecessor(history)
            if old is not None and _was_answered(history):
                watched.previous = Place(old.worker, old.worker_instance)
                watched.expected = _whole(divergence.tokens, made.ledger)
        elif own and made.predecessor is not None and _was_answered(history):
            watched.previous = Place(made.predecessor.worker, made.predecessor.worker_instance)
            watched.expected = _expected(made.predecessor, made.reused_tokens, made.ledger)
        elif left is not None:
            # The turn before it was not answered, so nobody knows what it left; what the last answered one did is there still.
            watched.previous = left.place
            watched.expected = _whole(left.tokens, made.ledger)
        kept = made.matched_messages if own and divergence is None and history.position == 0 else 0
        if not self.log.go_on(history.tenant, history.key, turn.messages, kept):
            self.log.remember(history.tenant, history.key, _conversation(turn), 0)
        return watched

    def started(self, watched: WatchedMiss, cached_tokens: int, place: Place) -> Miss | None:
        """The replica says what it found in its cache. Returns the miss, if it is one."""
        if watched.miss is not None and not watched.settled:
            watched.miss = self._found_elsewhere(watched, watched.miss, cached_tokens)
            # Before the place where the prompt changed, too, blocks may be gone. What cost more is told.
            if watched.miss is not None and watched.expected - cached_tokens > watched.miss.lost_tokens:
                watched.miss = None
        if watched.miss is None and not watched.settled:
            lost = watched.expected - cached_tokens
            # The last token of an answer may have been chosen and not computed, which can cost its block.
            if lost > watched.block_size:
                cause: Cause = "other_replica" if watched.previous.is_other(place) else "evicted"
                watched.miss = Miss(
                    request_id=watched.request_id,
                    at=self.clock(),
                    cause=cause,
                    tokens=cached_tokens,
                    lost_tokens=lost,
                    lost_seconds=self._seconds(watched.model, lost),
                    worker=place.worker,
                    previous_worker=watched.previous.worker,
                )
        if watched.miss is not None and not watched.settled:
            watched.settled = True
            if not watched.miss.worker:
                watched.miss = msgspec.structs.replace(watched.miss, worker=place.worker)
            self.log.add(watched.tenant, watched.session, watched.miss)
            self.found(watched.miss)
        return watched.miss

    def answered(
        self, watched: WatchedMiss, message: Mapping[str, Any], usage: Usage, prefill_seconds: float, place: Place
    ) -> None:
        """The turn was answered, by the worker at `place`; what was not cached of its prompt took `prefill_seconds`."""
        if not self.config.explain:
            return
        computed = usage.prompt_tokens - usage.cached_tokens
        self.log.answered(watched.tenant, watched.session, message, Left(watched.prompt_tokens, place))
        if computed > 0 and prefill_seconds > 0:
            rate = self._rates.setdefault(watched.model, _Rate())
            rate.seconds = rate.seconds * _RATE_KEEPS + prefill_seconds
            rate.tokens = rate.tokens * _RATE_KEEPS + computed

    def _found_elsewhere(self, watched: WatchedMiss, miss: Miss, cached_tokens: int) -> Miss | None:
        """A miss without what the replica still had of an earlier branch, or of another session; None when that is all."""
        # The last token of a prompt is always computed, and costs its block.
        reachable = (watched.prompt_tokens - 1) // watched.block_size * watched.block_size
        if reachable - cached_tokens < watched.block_size:
            return None
        lost = min(miss.lost_tokens, watched.prompt_tokens - cached_tokens)
        if lost == miss.lost_tokens:
            return miss
        return msgspec.structs.replace(miss, lost_tokens=lost, lost_seconds=self._seconds(watched.model, lost))

    def _diverged(self, turn: Turn, history: TurnHistory, divergence: Divergence, lost: int) -> Miss:
        # The text that is known is that of the session's last turn here, which is its newest branch unless another gateway
        # has served it since.
        before = self.log.previous(history.tenant, history.key) if history.position in (0, None) else None
        if before is not None and not _is_text_of(before, _predecessor(history)):
            before = None
        difference = first_difference(before, _conversation(turn)) if before is not None else None
        if difference is None:
            cause = "template" if before is not None else _UNKNOWN_TEXT[divergence.cause]
            path = f"messages[{divergence.message}]" if divergence.cause != "context" or before is not None else ""
            difference = Difference(cause, path, divergence.message, 0, "", "")
        elif not self.config.excerpts:
            difference = Difference(difference.cause, difference.path, difference.message, difference.offset, "", "")
        old = _predecessor(history)
        ids = history.continuation.ledger
        return Miss(
            request_id=turn.request_id,
            at=self.clock(),
            cause=difference.cause,
            path=difference.path,
            message=difference.message,
            field_bytes=difference.offset,
            text_bytes=self._text_bytes(history.model, ids, divergence.tokens),
            tokens=divergence.tokens,
            lost_tokens=lost,
            lost_seconds=self._seconds(history.model, lost),
            before=difference.old,
            after=difference.new,
            previous_worker=old.worker if old is not None else "",
        )

    def _text_bytes(self, model: str, ledger: Ledger, tokens: int) -> int:
        """Bytes of the prompt's text before token `tokens`: the last span that ends before it, and what is left decoded."""
        tokens = min(tokens, ledger.num_tokens)
        before = (0, 0)
        for span in ledger.iter_spans():
            if span.tokens > tokens:
                break
            before = (span.tokens, span.text_bytes)
        rest = ledger.tokens.part(before[0], tokens)
        text = self.decode(model, list_tokens(rest)) if rest else ""
        return before[1] + len(text.encode("utf-8", "surrogatepass"))

    def _seconds(self, model: str, tokens: int) -> float | None:
        rate = self._rates.get(model)
        return tokens * rate.seconds / rate.tokens if rate is not None and rate.tokens > 0 else None


def _was_answered(history: TurnHistory) -> bool:
    """Whether the predecessor ran to its end, so that its blocks were computed. One that was aborted may never have begun."""
    made, record = history.continuation, history.record
    if made.predecessor is not None and made.predecessor.pending:
        return True
    return history.position == 0 and record is not None and record.called is not None


def _is_text_of(conversation: Conversation, ledger: Ledger | None) -> bool:
    """Whether a ledger is that of the conversation, with or without the answer. The last message that was sent says so: answers
    may have come back with other words."""
    if ledger is None or not 0 <= len(conversation.messages) - ledger.num_messages <= 1:
        return False
    last = conversation.messages[ledger.num_messages - 1] if ledger.num_messages else {}
    return message_digest(last) == ledger.messages[-DIGEST_BYTES:]


def _predecessor(history: TurnHistory) -> Ledger | None:
    """The ledger that the turn goes on from; else, where it shares not one message with any, the session's last."""
    made, record = history.continuation, history.record
    if made.predecessor is not None or record is None or not record.branches:
        return made.predecessor
    return record.branches[0]


def _divergence(history: TurnHistory) -> Divergence | None:
    """Where the turn parts from its predecessor; from its first message on, where it shares none with it."""
    made = history.continuation
    old = _predecessor(history)
    if made.predecessor is not None or old is None or old.root != made.ledger.root:
        return made.divergence
    tokens = made.ledger.tokens.common(old.tokens)
    return Divergence("message", 0, tokens, 0, max(old.num_tokens + old.longest_answer - tokens, 0))


def _expected(old: Ledger, reused: int, new: Ledger) -> int:
    """Tokens of whole blocks that the predecessor left and this prompt begins with; the last token of a prompt is always
    computed."""
    return _whole(min(reused, old.num_tokens + old.longest_answer), new)


def _whole(shared: int, new: Ledger) -> int:
    """Of that many shared tokens those that a cache of whole blocks can spare this prompt, whose last is always computed."""
    return min(shared, max(new.num_tokens - 1, 0)) // new.block_size * new.block_size


def _conversation(turn: Turn) -> Conversation:
    settings = {"model": turn.model, **turn.template_kwargs}
    return Conversation(turn.messages, [tool_dict(tool) for tool in turn.tools], settings)
