"""Records the turns a gateway served as trajectories: one file a session, on a thread of its own.

The gateway tells it of finished turns; whatever cannot be taken at once is dropped, counted and logged, and never waited
for. Recorded are answered chat turns; failed ones and other dialects are counted as skipped. A directory belongs to one
recorder at a time; one that comes later appends to the files it finds.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from gateway.turn import TurnRecord
from traces.format import FORMAT_VERSION, Timing, TraceFormatError, TurnLine, Usage, encode_line
from traces.history import Delta, DeltaEncoder, message_digest
from traces.session_file import SessionFile, file_name

logger = logging.getLogger(__name__)

NOT_RECORDED = frozenset(
    {"model", "messages", "tools", "stream", "stream_options", "store", "metadata", "user", "safety_identifier"}
    | {
        "session_id",
        "prompt_cache_key",
        "prompt_cache_retention",
        "previous_response_id",
        "agent_hint",
        "vllm_xargs",
        "cache_salt",
    }
)
"""Body fields that say who asks or how to deliver, not what to answer."""

SECONDS_BETWEEN_WARNINGS = 60.0


class RecorderError(Exception):
    """The recorder cannot start; the message says what to change."""


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """Bounds. A turn in the queue holds its request, so the queue is bounded by prompt tokens too."""

    directory: Path
    max_queued_turns: int = 1024
    max_queued_prompt_tokens: int = 8_000_000
    max_sessions: int = 4096
    max_remembered_messages: int = 1_000_000
    max_bytes: int = 10 * 1024**3


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Turns since the start. `dropped`: queue or disk budget full; `failed`: could not be written; `skipped`: not recorded."""

    written: int = 0
    dropped: int = 0
    failed: int = 0
    skipped: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class _Session:
    file: SessionFile
    encoder: DeltaEncoder
    chain: bytes | None = None


class Recorder:
    """A gateway.turn.TurnObserver. `close` writes what is queued and ends the thread.

    Raises RecorderError when the directory cannot be used or another recorder uses it.
    """

    def __init__(self, config: RecorderConfig) -> None:
        self._config = config
        self._lock_file = _claim(config.directory)
        self._condition = threading.Condition()
        self._queue: deque[TurnRecord] = deque()
        self._queued_tokens = 0
        self._closing = False
        self._busy = False
        self._stats = RecorderStats()
        self._warned_at = -SECONDS_BETWEEN_WARNINGS
        # Below: the writer thread's own.
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._anonymous: dict[bytes, tuple[str, str]] = {}
        self._remembered = 0
        self._bytes = sum(path.stat().st_size for path in config.directory.glob("*.jsonl"))
        self._thread = threading.Thread(target=self._run, name="turnkeep-recorder", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> RecorderStats:
        return self._stats

    def turn_finished(self, record: TurnRecord) -> None:
        """Queues a turn, or drops it when the queue is full. Never blocks on the disk."""
        with self._condition:
            full = len(self._queue) >= self._config.max_queued_turns or (
                self._queue and self._queued_tokens + record.prompt_tokens > self._config.max_queued_prompt_tokens
            )
            if full or self._closing:
                self._count(dropped=1)
            else:
                self._queue.append(record)
                self._queued_tokens += record.prompt_tokens
                self._condition.notify_all()
                return
        self._warn("the recorder is behind its disk: %d turns dropped so far", self._stats.dropped)

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until all that was queued is written; False when `timeout` seconds were not enough."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Writes what is queued, for at most `timeout` seconds, and ends; idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the recorder could not write its last %d turns in %.0f s", len(self._queue), timeout)
            return
        self._lock_file.close()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                record = self._queue.popleft()
                self._queued_tokens -= record.prompt_tokens
                self._busy = True
            try:
                self._write(record)
            except (TraceFormatError, OSError, TypeError, ValueError) as error:
                self._count(failed=1)
                self._warn("a turn of session %r was not recorded: %s", record.session.key, error)
            except Exception:
                # Whatever is wrong with one turn, the next ones are still recorded.
                self._count(failed=1)
                logger.exception("a turn of session %r was not recorded", record.session.key)
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

    def _write(self, record: TurnRecord) -> None:
        messages, answer = record.request.get("messages"), _answer(record)
        if not isinstance(messages, list) or not messages or answer is None:
            self._count(skipped=1)
            return
        if self._bytes >= self._config.max_bytes:
            self._count(dropped=1)
            self._warn("the recorder's budget of %d bytes is used up; nothing more is recorded", self._config.max_bytes)
            return
        tools = record.request.get("tools") or []
        identity, chain = self._identify(record, messages, answer)
        session = self._session(identity)
        remembered = session.encoder.digests
        delta = session.encoder.encode(messages, tools, answer)
        self._remembered += session.encoder.digests - remembered
        try:
            encoded = encode_line(_line(record, session.file, delta, answer))
            size = session.file.append(encoded, record.started_at + record.duration)
        except BaseException:
            self._remembered -= session.encoder.digests
            session.encoder.forget()
            raise
        self._bytes += size
        if chain is not None:
            if session.chain is not None:
                self._anonymous.pop(session.chain, None)
            session.chain = chain
            self._anonymous[chain] = identity
        self._count(written=1, bytes_written=size)
        self._evict()

    def _identify(
        self, record: TurnRecord, messages: list[Any], answer: Mapping[str, Any]
    ) -> tuple[tuple[str, str], bytes | None]:
        """Who it is, and for a caller that names no session the digest of its history after this turn.

        Such a caller continues the session whose whole history its request begins with.
        """
        tenant = record.session.tenant
        if record.session.key is not None:
            return (tenant, record.session.key), None
        chain = xxhash.xxh3_128_digest(tenant.encode())
        identity: tuple[str, str] | None = None
        for message in messages:
            chain = xxhash.xxh3_128_digest(chain + message_digest(message))
            identity = self._anonymous.get(chain, identity)
        after = xxhash.xxh3_128_digest(chain + message_digest(answer))
        return identity or (tenant, f"unnamed-{record.request_id}"), after

    def _session(self, identity: tuple[str, str]) -> _Session:
        session = self._sessions.get(identity)
        if session is None:
            tenant, key = identity
            # The tenant is a digest already; its start keeps equal keys of two tenants apart in one trace.
            name = f"{tenant[:8]}:{key}" if tenant else key
            file = SessionFile.open(self._config.directory / file_name(tenant, key), name)
            session = self._sessions[identity] = _Session(file, DeltaEncoder())
            if file.next_turn:
                # What it holds is not in memory; the first line repeats the whole request.
                session.encoder.forget()
            self._evict()
        self._sessions.move_to_end(identity)
        return session

    def _evict(self) -> None:
        config = self._config
        while len(self._sessions) > 1 and (
            len(self._sessions) > config.max_sessions or self._remembered > config.max_remembered_messages
        ):
            _identity, session = self._sessions.popitem(last=False)
            self._remembered -= session.encoder.digests
            if session.chain is not None:
                self._anonymous.pop(session.chain, None)

    def _count(self, **more: int) -> None:
        with self._condition:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + count for name, count in more.items()})

    def _warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            logger.warning(message, *values)


def _claim(directory: Path) -> IO[bytes]:
    """Makes the directory and takes its lock. Raises RecorderError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock_file = open(directory / ".lock", "ab")  # noqa: SIM115 - held open as long as the recorder lives
    except OSError as error:
        raise RecorderError(f"Turns cannot be recorded in {directory}: {error.strerror or error}.") from error
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock_file.close()
        raise RecorderError(f"Another recorder writes in {directory}; give each gateway a directory of its own.") from error
    return lock_file


def _answer(record: TurnRecord) -> dict[str, Any] | None:
    """The assistant message of an answered chat turn, without fields that say nothing."""
    if record.status != 200 or record.error is not None or record.response is None:
        return None
    choices = record.response.get("choices")
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    empty: tuple[Any, ...] = (None, [], "")
    return {name: value for name, value in message.items() if name in ("role", "content") or value not in empty}


def _line(record: TurnRecord, file: SessionFile, delta: Delta, answer: dict[str, Any]) -> TurnLine:
    gap = max(0.0, record.started_at - file.ended_at) if file.ended_at is not None else 0.0
    return TurnLine(
        v=FORMAT_VERSION,
        session=file.session,
        turn=file.next_turn,
        gap_seconds=round(gap, 6),
        keep=delta.keep,
        messages=delta.messages,
        tools=delta.tools,
        model=record.model,
        params={name: value for name, value in record.request.items() if name not in NOT_RECORDED},
        assistant=answer,
        output_tokens=record.completion_tokens,
        finish_reason=record.finish_reason,
        usage=Usage(
            prompt_tokens=record.prompt_tokens, completion_tokens=record.completion_tokens, cached_tokens=record.cached_tokens
        ),
        timing=Timing(
            duration=record.duration, time_to_first_token=record.time_to_first_token, started_at=round(record.started_at, 6)
        ),
    )
