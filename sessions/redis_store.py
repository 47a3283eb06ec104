"""Sessions shared by several gateways through Redis, with a copy of one's own beside it.

Every turn asks Redis for the version only; the record crosses when another gateway has written a newer one. Writes are
optimistic: they name the version that they replace. While Redis is slow or gone, the own copy serves, and what is written goes
to Redis when it is back, unless something newer stands there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from sessions.codec import FORMAT, CodecError, decode_record, encode_record
from sessions.memory_store import MemoryLedgerStore, new_epoch, recognised_in_memory
from sessions.records import SessionRecord
from sessions.redis_link import RedisLink, is_wrong_type
from sessions.redis_scripts import DELETE, DROP_CORRUPT, DROP_WRONG_TYPE, PUT
from sessions.store import Page, StoreStats

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

_TOMBSTONE = b"x"
_TOMBSTONE_MS = 600_000
_MAX_UNSAVED = 10_000
_PAGE_BUDGET = 2.0
_FLUSH_BUDGET = 1.0
_QUIET_SECONDS = 60.0
_Key = tuple[str, str]


class RedisLedgerStore:
    """A `sessions.store.LedgerStore`. Use on one event loop; `aclose` writes what is still unwritten, for a second.

    `events` counts what happened: `corrupt` entries that were ignored, `oversized` records that stayed here, `conflicts`
    between gateways, `remote` records taken over from another gateway, `unsaved` writes that wait for Redis, `lost` ones.
    """

    def __init__(self, local: MemoryLedgerStore, link: RedisLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._local = local
        self._link = link
        self._clock = clock
        self.events: Counter[str] = Counter()
        self._put_script = link.client.register_script(PUT)
        self._delete_script = link.client.register_script(DELETE)
        self._wrong_type_script = link.client.register_script(DROP_WRONG_TYPE)
        self._drop_script = link.client.register_script(DROP_CORRUPT)
        # Sessions whose last write Redis has not seen; True: their deletion.
        self._unsaved: OrderedDict[_Key, bool] = OrderedDict()
        self._flushing: asyncio.Task[None] | None = None
        self._complained_at = -_QUIET_SECONDS
        self._base = f"{link.config.prefix}:{FORMAT}"
        link.when_back(self._flush_soon)

    async def get(self, tenant: str, key: str) -> SessionRecord | None:
        mine = await self._local.get(tenant, key)
        if self._unsaved.get((tenant, key)):
            return None  # deleted here; Redis does not know yet
        name = self._session(tenant, key)
        head = await self._link.call(
            "version",
            lambda redis: _many(redis.hmget(name, ["v", "u", "e"])),
            None,
            wrong_type=lambda: self._wrong_type(name, "hash"),
        )
        if head is None or head[0] is None:
            # Not reached, never written, expired or flushed: the copy here is as good as ever.
            return mine
        version, written, epoch = head[0], head[1], _text(head[2])
        if version == _TOMBSTONE:
            self._local.bury(tenant, key, epoch)
            return None
        number = _number(version)
        if mine is not None and mine.epoch != epoch and (tenant, key) not in self._unsaved:
            mine = None  # deleted elsewhere, and begun anew
        if mine is not None and number is not None and (number, written) == (mine.version, _written(mine)):
            return mine
        if mine is not None and number is not None and number < mine.version:
            return mine  # what was written here is still on its way, or was lost there
        theirs = await self._fetch(tenant, key)
        if theirs is None:
            return mine
        if mine is None or theirs.version > mine.version or theirs.used_at > mine.used_at:
            self.events["remote"] += 1
            self._local.replace(theirs)
            return theirs
        return mine

    async def peek(self, tenant: str, key: str) -> SessionRecord | None:
        return None if self._unsaved.get((tenant, key)) else await self._local.get(tenant, key)

    async def put(self, record: SessionRecord) -> bool:
        at = (record.tenant, record.key)
        before = await self._local.get(*at)
        if not await self._local.put(record):
            return False
        self._unsaved.pop(at, None)
        outcome = await self._write(record, before, "next", self._link.config.write_budget)
        if outcome == 0:
            self.events["conflicts"] += 1
            theirs = await self._fetch(*at)
            if theirs is not None:
                self._local.replace(theirs)
            elif before is not None:
                self._local.replace(before)
            else:
                await self._local.delete(*at)
            return False
        if outcome == -1:
            await self.get(*at)  # which takes over what stands there instead
            return False
        if outcome is None:
            self._later(at, deleted=False)
        return True

    def epoch(self, tenant: str, key: str) -> str:
        return self._local.epoch(tenant, key)

    async def delete(self, tenant: str, key: str) -> bool:
        epoch = new_epoch()
        had = self._local.bury(tenant, key, epoch)
        self._unsaved.pop((tenant, key), None)
        found = await self._tombstone(tenant, key, epoch, self._link.config.write_budget)
        if found is None:
            self._later((tenant, key), deleted=True)
        return had or bool(found)

    async def touch(self, tenant: str, key: str) -> None:
        await self._local.touch(tenant, key)
        name, ttl = self._session(tenant, key), self._ttl_ms
        await self._link.call("touch", lambda redis: redis.pexpire(name, ttl), False)

    async def recognise(self, tenant: str, names: Sequence[bytes]) -> str | None:
        found, longer = await recognised_in_memory(self._local, tenant, names)
        if not longer:
            return found
        keys = [self._name(tenant, name) for name in reversed(longer)]
        answers = await self._link.call("recognise", lambda redis: _many(redis.mget(keys)), None)
        for answer in answers or ():
            if answer is not None:
                return str(answer, "utf-8", "replace")
        return found

    async def page(self, tenant: str, *, after: str | None, limit: int) -> Page:
        mine = await self._local.page(tenant, after=after, limit=limit)
        theirs = await self._remote_page(tenant, after, limit)
        if theirs is None:
            return mine
        records = {record.key: record for record in theirs[0]}
        ended = await self._ended_elsewhere(tenant, [record.key for record in mine.records if record.key not in records])
        for record in mine.records:
            if record.key in ended:
                continue
            known = records.get(record.key)
            if known is None or record.version > known.version:
                records[record.key] = record
        keys = sorted(records)
        more = len(keys) > limit or mine.after is not None or theirs[1]
        shown = keys[:limit]
        return Page(tuple(records[key] for key in shown), shown[-1] if more and shown else None)

    def stats(self) -> StoreStats:
        return self._local.stats()

    @property
    def unsaved(self) -> int:
        """Sessions whose last write waits for Redis."""
        return len(self._unsaved)

    async def aclose(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
        if self._unsaved and self._link.up:
            try:
                async with asyncio.timeout(1.0):
                    await self._flush()
            except TimeoutError:
                log.warning("%d sessions were not written to Redis in time", len(self._unsaved))
        await self._link.aclose()

    async def _fetch(self, tenant: str, key: str) -> SessionRecord | None:
        name = self._session(tenant, key)
        budget = self._link.config.write_budget
        answer = await self._link.call(
            "read",
            lambda redis: _many(redis.hmget(name, ["d", "u"])),
            None,
            budget=budget,
            wrong_type=lambda: self._wrong_type(name, "hash"),
        )
        if answer is None or answer[0] is None:
            return None
        try:
            record = decode_record(answer[0])
            if (record.tenant, record.key) != (tenant, key):
                raise CodecError("it belongs to another session")
        except CodecError as error:
            await self._corrupt(name, answer[1] or b"", error)
            return None
        return record

    def _complain(self, why: object) -> None:
        self.events["corrupt"] += 1
        if self._clock() - self._complained_at >= _QUIET_SECONDS:
            self._complained_at = self._clock()
            log.warning("a session in Redis is ignored and dropped: %s (further ones within a minute are only counted)", why)

    async def _wrong_type(self, name: str, expected: str) -> None:
        self._complain(f"its key is no {expected}")
        await self._link.call("drop", lambda redis: self._wrong_type_script(keys=[name], args=[expected], client=redis), 0)

    async def _corrupt(self, name: str, written: bytes, error: CodecError) -> None:
        self._complain(error)
        await self._link.call("drop", lambda redis: self._drop_script(keys=[name], args=[written], client=redis), 0)

    async def _write(self, record: SessionRecord, before: SessionRecord | None, mode: str, budget: float) -> int | None:
        """1: written, or too large to be; 0: another version stands there; -1: it was deleted; None: Redis did not
        answer."""
        data = encode_record(record)
        if len(data) > self._link.config.max_entry_bytes:
            self.events["oversized"] += 1
            return 1
        tenant, key = record.tenant, record.key
        names = record.prefix_names()
        gone = [name for name in before.prefix_names() if name not in names] if before is not None else []
        keys = [self._session(tenant, key), *self._listings(tenant)]
        keys += [self._name(tenant, name) for name in (*names, *gone)]
        args: list[bytes | str | int | float] = [
            record.version,
            _written(record),
            data,
            self._ttl_ms,
            key.encode(),
            mode,
            len(names),
            record.epoch,
        ]
        return await self._link.call(
            "write", lambda redis: self._put_script(keys=keys, args=args, client=redis), None, budget=budget
        )

    async def _tombstone(self, tenant: str, key: str, epoch: str, budget: float) -> int | None:
        keys = [self._session(tenant, key), *self._listings(tenant)]
        args: list[bytes | str | int | float] = [_TOMBSTONE_MS, key.encode(), epoch]
        return await self._link.call(
            "delete", lambda redis: self._delete_script(keys=keys, args=args, client=redis), None, budget=budget
        )

    async def _ended_elsewhere(self, tenant: str, keys: Sequence[str]) -> set[str]:
        """Which of these another gateway has deleted: their copies here go too."""

        async def read(redis: Redis) -> list[Any]:
            return await _each(redis, [self._session(tenant, key) for key in keys], "v", "e")

        heads = await self._link.call("page", read, None, budget=_PAGE_BUDGET) if keys else []
        found = [(key, head) for key, head in zip(keys, heads or (), strict=False) if not is_wrong_type(head)]
        ended = {key: _text(epoch) for key, (version, epoch) in found if version == _TOMBSTONE}
        for key, epoch in ended.items():
            self._local.bury(tenant, key, epoch)
        return set(ended)

    async def _remote_page(self, tenant: str, after: str | None, limit: int) -> tuple[list[SessionRecord], bool] | None:
        low = b"-" if after is None else b"(" + after.encode()
        listing = self._listings(tenant)[0]
        keys = await self._link.call(
            "page",
            lambda redis: _many(redis.zrangebylex(listing, low, b"+", 0, limit + 1)),
            None,
            budget=_PAGE_BUDGET,
            wrong_type=lambda: self._wrong_type(listing, "zset"),
        )
        if keys is None:
            return None
        names = [self._session(tenant, member.decode("utf-8", "replace")) for member in keys[:limit]]

        async def read(redis: Redis) -> list[Any]:
            return await _each(redis, names, "d")

        blobs = await self._link.call("page", read, None, budget=_PAGE_BUDGET) if names else []
        if blobs is None:
            return None
        records = []
        for name, head in zip(names, blobs, strict=False):
            if is_wrong_type(head):
                await self._wrong_type(name, "hash")
                continue
            (blob,) = head
            if blob is None:
                continue
            try:
                records.append(decode_record(blob))
            except CodecError:
                self.events["corrupt"] += 1
        return [record for record in records if record.tenant == tenant], len(keys) > limit

    def _later(self, at: _Key, *, deleted: bool) -> None:
        self.events["unsaved"] += 1
        self._unsaved.pop(at, None)
        self._unsaved[at] = deleted
        if len(self._unsaved) > _MAX_UNSAVED:
            self._unsaved.popitem(last=False)
            self.events["lost"] += 1
        if self._link.up:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if self._unsaved and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        while self._unsaved and self._link.up:
            at, deleted = next(iter(self._unsaved.items()))
            record = None if deleted else await self._local.get(*at)
            outcome: int | None = 1
            if deleted:
                outcome = await self._tombstone(*at, self._local.epoch(*at) or new_epoch(), _FLUSH_BUDGET)
            elif record is not None:
                outcome = await self._write(record, None, "newer", _FLUSH_BUDGET)
            if outcome is None:
                # Once more, after a pause; when the link goes down, its coming back begins it anew.
                await asyncio.sleep(self._link.config.retry_interval)
                continue
            # It may have been written again while this waited.
            if self._unsaved.get(at) is deleted and (deleted or await self._local.get(*at) is record):
                del self._unsaved[at]

    def _session(self, tenant: str, key: str) -> str:
        return f"{self._base}:s:{tenant}:{key}"

    def _name(self, tenant: str, name: bytes) -> str:
        return f"{self._base}:n:{tenant}:{name.hex()}"

    def _listings(self, tenant: str) -> tuple[str, str]:
        return f"{self._base}:k:{tenant}", f"{self._base}:e:{tenant}"

    @property
    def _ttl_ms(self) -> int:
        return max(1, int(self._link.config.ttl * 1000))


async def _each(redis: Redis, names: Sequence[str], *fields: str) -> list[Any]:
    """The fields of each hash, as a list; in place of one whose key is no hash the error. Raises other errors."""
    async with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(name, fields)
        answers = await pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not is_wrong_type(answer):
            raise answer
    return answers


def _many(answer: Awaitable[Any]) -> Awaitable[list[Any] | None]:
    """redis-py types what may be sync or async as both."""
    return answer


def _written(record: SessionRecord) -> bytes:
    return repr(record.used_at).encode()


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _number(version: bytes) -> int | None:
    try:
        return int(version)
    except ValueError:
        return None
