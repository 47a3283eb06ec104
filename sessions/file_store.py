"""Sessions of one gateway that outlive it: a copy of each in one SQLite file, beside those in memory.

What is in memory serves. What is not, after a restart or because memory is bounded, is read from the file when its session
asks. Writes go to a thread of their own and wait for nothing: a kill takes the turns of the last moment, a loss of power (WAL,
synchronous NORMAL) those of the last seconds, and both leave a whole file. A file that cannot be read or written costs time,
never a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sessions.codec import FORMAT, CodecError, decode_record, encode_record
from sessions.memory_store import MemoryLedgerStore, recognised_in_memory
from sessions.records import SessionRecord
from sessions.store import Page, StoreStats

log = logging.getLogger(__name__)

_ABANDONED_AFTER = 14 * 86400.0
_BUDGET = 0.25
_CLOSING = 5.0
_MAX_UNSAVED = 10_000
_BATCH = 64
_RETRY = 5.0
_QUIET_SECONDS = 60.0
_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS sessions (
  tenant TEXT NOT NULL, key TEXT NOT NULL, used REAL NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (tenant, key));
CREATE INDEX IF NOT EXISTS by_use ON sessions (used);
CREATE TABLE IF NOT EXISTS names (
  tenant TEXT NOT NULL, name BLOB NOT NULL, key TEXT NOT NULL, PRIMARY KEY (tenant, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_session ON names (tenant, key);
"""
_Key = tuple[str, str]

AnswerT = TypeVar("AnswerT")


class SessionFileError(Exception):
    """The file cannot be used at all. The message is a sentence with the remedy."""


class SessionFile:
    """The file. Use from one thread; everything may raise sqlite3.Error, opening SessionFileError."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """max_bytes: of records; those used longest ago go first."""
        self._max_bytes = max_bytes
        self.path = directory / f"turnkeep-sessions-{FORMAT}.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for other in directory.glob("turnkeep-sessions-*.sqlite"):
                if other != self.path:
                    log.warning("%s is of another version and is not read; remove it when nothing uses it.", other)
            self._open()
        except OSError as error:
            raise SessionFileError(f"{directory} cannot be used for sessions: {error.strerror or error}.") from error

    def _open(self) -> None:
        try:
            self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                if "locked" in str(error):
                    message = (
                        f"{self.path} is used by another gateway; give each a directory of its own, or share with --redis."
                    )
                    raise SessionFileError(message) from error
                raise SessionFileError(f"{self.path} cannot be used for sessions: {error}.") from error
            damaged = self.path.with_suffix(".damaged")
            log.warning("%s is damaged (%s); it is kept as %s, and sessions begin anew.", self.path, error, damaged.name)
            os.replace(self.path, damaged)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self._connect()

    def _connect(self) -> None:
        # What was said in sessions is nobody else's.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._database = sqlite3.connect(self.path, timeout=0.5, check_same_thread=False)
        try:
            self._database.executescript(_SCHEMA)
            with self._database:
                self._drop_where("used < ?", (time.time() - _ABANDONED_AFTER,))
            (self._bytes,) = self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM sessions").fetchone()
        except sqlite3.Error:
            self._database.close()
            raise

    def read(self, tenant: str, key: str) -> bytes | None:
        """The bytes of a record."""
        row = self._database.execute("SELECT data FROM sessions WHERE tenant = ? AND key = ?", (tenant, key)).fetchone()
        return None if row is None else bytes(row[0])

    def longest(self, tenant: str, names: Sequence[bytes]) -> str | None:
        """The key of the session that has the last of `names` that any has."""
        marks = ",".join("?" * len(names))
        rows = self._database.execute(f"SELECT name, key FROM names WHERE tenant = ? AND name IN ({marks})", (tenant, *names))
        keys = {bytes(name): str(key) for name, key in rows}
        return next((keys[name] for name in reversed(names) if name in keys), None)

    def page(self, tenant: str, after: str | None, limit: int) -> list[bytes]:
        """Records of a tenant in the order of their keys, those behind `after`."""
        rows = self._database.execute(
            "SELECT data FROM sessions WHERE tenant = ? AND key > ? ORDER BY key LIMIT ?", (tenant, after or "", limit)
        )
        return [bytes(data) for (data,) in rows]

    def write(self, changes: Sequence[tuple[_Key, bytes | None, float, Sequence[bytes]]]) -> None:
        """(tenant and key, the record or None to drop it, when it was used, its names), all of them or none."""
        before = self._bytes
        try:
            with self._database:
                for at, data, used, names in changes:
                    self._drop_where("tenant = ? AND key = ?", at)
                    if data is not None:
                        self._database.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", (*at, used, len(data), data))
                        self._database.executemany(
                            "INSERT OR REPLACE INTO names VALUES (?, ?, ?)", [(at[0], name, at[1]) for name in names]
                        )
                        self._bytes += len(data)
                while self._bytes > self._max_bytes:
                    (oldest,) = self._database.execute("SELECT MIN(used) FROM sessions").fetchone()
                    if oldest is None:
                        self._bytes = 0
                        break
                    self._drop_where("used <= ?", (oldest,))
        except BaseException:
            self._bytes = before
            raise
        self._database.execute("PRAGMA incremental_vacuum(256)").fetchall()

    def _drop_where(self, condition: str, values: Sequence[object]) -> None:
        gone = self._database.execute(f"DELETE FROM sessions WHERE {condition} RETURNING tenant, key, bytes", values).fetchall()
        for tenant, key, size in gone:
            self._database.execute("DELETE FROM names WHERE tenant = ? AND key = ?", (tenant, key))
            if hasattr(self, "_bytes"):
                self._bytes -= size

    def close(self) -> None:
        """Leaves one file."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()


class FileLedgerStore:
    """A `sessions.store.LedgerStore`. Use on one event loop; `aclose` writes what is still unwritten.

    `events` counts what happened: `corrupt` records that were ignored, `restored` ones read from the file, `failed` reads and
    writes, `lost` writes.
    """

    def __init__(self, local: MemoryLedgerStore, directory: Path, max_bytes: int) -> None:
        """Raises SessionFileError."""
        self.events: Counter[str] = Counter()
        self._local = local
        self._file = SessionFile(directory, max_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-file")
        self._unsaved: OrderedDict[_Key, SessionRecord | None] = OrderedDict()
        self._writing: asyncio.Task[None] | None = None
        self._complained_at = -_QUIET_SECONDS
        self._left_until = 0.0

    async def get(self, tenant: str, key: str) -> SessionRecord | None:
        at = (tenant, key)
        mine = await self._local.get(tenant, key)
        if mine is not None:
            return mine
        if at in self._unsaved:
            return self._unsaved[at]
        read = await self._ask(lambda: self._read(tenant, key), None)
        if at in self._unsaved:  # written, or deleted, meanwhile
            return self._unsaved[at]
        mine = await self._local.get(tenant, key)
        if mine is None and read is not None:
            self.events["restored"] += 1
            self._local.replace(read)
        return mine or read

    async def peek(self, tenant: str, key: str) -> SessionRecord | None:
        return await self._local.get(tenant, key) or self._unsaved.get((tenant, key))

    async def put(self, record: SessionRecord) -> bool:
        if not await self._local.put(record):
            return False
        self._later((record.tenant, record.key), record)
        return True

    def epoch(self, tenant: str, key: str) -> str:
        return self._local.epoch(tenant, key)

    async def delete(self, tenant: str, key: str) -> bool:
        # Into memory first: a deletion begins a new epoch of what is there.
        had = await self.get(tenant, key) is not None
        await self._local.delete(tenant, key)
        self._later((tenant, key), None)
        return had

    async def touch(self, tenant: str, key: str) -> None:
        await self._local.touch(tenant, key)

    async def recognise(self, tenant: str, names: Sequence[bytes]) -> str | None:
        found, longer = await recognised_in_memory(self._local, tenant, names)
        if not longer:
            return found
        key = await self._ask(lambda: self._file.longest(tenant, longer), None)
        at = (tenant, key or "")
        is_deleted = at in self._unsaved and self._unsaved[at] is None
        return found if key is None or is_deleted else key

    async def page(self, tenant: str, *, after: str | None, limit: int) -> Page:
        mine = await self._local.page(tenant, after=after, limit=limit)
        none: list[SessionRecord | None] = []
        kept = await self._ask(lambda: [self._decoded(data) for data in self._file.page(tenant, after, limit + 1)], none)
        records = {record.key: record for record in kept if record is not None}
        records |= {record.key: record for record in mine.records}
        gone = {key for (owner, key), record in self._unsaved.items() if owner == tenant and record is None}
        keys = sorted(set(records) - gone)
        shown = keys[:limit]
        return Page(tuple(records[key] for key in shown), shown[-1] if shown and (len(keys) > limit or mine.after) else None)

    def stats(self) -> StoreStats:
        return self._local.stats()

    async def aclose(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError, sqlite3.Error):
            async with asyncio.timeout(_CLOSING):
                while self._unsaved:
                    await self._write_some()
        if self._unsaved:
            log.warning("%d sessions were not written to %s in time", len(self._unsaved), self._file.path)
            self._unsaved.clear()
        await loop.run_in_executor(self._thread, self._file.close)
        self._thread.shutdown(wait=False)

    # On the thread.

    def _read(self, tenant: str, key: str) -> SessionRecord | None:
        data = self._file.read(tenant, key)
        record = None if data is None else self._decoded(data)
        return record if record is not None and (record.tenant, record.key) == (tenant, key) else None

    def _decoded(self, data: bytes) -> SessionRecord | None:
        try:
            return decode_record(data)
        except CodecError as error:
            self.events["corrupt"] += 1
            self._complain("a session in %s is ignored: %s", error)
            return None

    def _write(self, batch: Sequence[tuple[_Key, SessionRecord | None]]) -> None:
        self._file.write(
            [
                (at, None, 0.0, ()) if record is None else (at, encode_record(record), record.used_at, record.prefix_names())
                for at, record in batch
            ]
        )

    # On the event loop.

    async def _ask(self, call: Callable[[], AnswerT], otherwise: AnswerT) -> AnswerT:
        if time.monotonic() < self._left_until:
            return otherwise
        try:
            async with asyncio.timeout(_BUDGET):
                return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (TimeoutError, sqlite3.Error) as error:
            self._left_until = time.monotonic() + _RETRY
            self.events["failed"] += 1
            self._complain("sessions cannot be read from %s: %s", error or "it took too long")
            return otherwise

    def _later(self, at: _Key, record: SessionRecord | None) -> None:
        self._unsaved.pop(at, None)
        self._unsaved[at] = record
        if len(self._unsaved) > _MAX_UNSAVED:
            self._unsaved.popitem(last=False)
            self.events["lost"] += 1
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        while self._unsaved:
            try:
                await self._write_some()
            except sqlite3.Error as error:
                self.events["failed"] += 1
                self._complain("sessions cannot be written to %s: %s", error)
                await asyncio.sleep(_RETRY)

    async def _write_some(self) -> None:
        batch = [(at, self._unsaved[at]) for at in list(self._unsaved)[:_BATCH]]
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)
        for at, record in batch:
            if at in self._unsaved and self._unsaved[at] is record:
                del self._unsaved[at]

    def _complain(self, message: str, why: object) -> None:
        now = time.monotonic()
        if now - self._complained_at >= _QUIET_SECONDS:
            self._complained_at = now
            log.warning(message + " (further ones within a minute are only counted)", self._file.path, why)
