"""What Redis holds of one kind of block, as calls that are made there in one step each (offload.remote_scripts)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import redis

from offload.checksum import key_salt, payload_checksum
from offload.errors import TierUnavailable
from offload.remote_scripts import DROP, LOAD, MARK, SHRINK, STORE
from prefix_cache.hashing import BlockHash

FORMAT = 2
"""Part of every name: what another version has written is not seen."""

ABANDONED_AFTER = 14 * 86400
"""Seconds after which a block that nobody has asked for is gone."""

SUM_BYTES = 8
_TIMEOUT = 1.0
_MANY = 256
_ROOT = b"turnkeep:kv"
_FORMATS = _ROOT + b":formats"
_REGISTRY = _ROOT + b":%d" % FORMAT

ResultT = TypeVar("ResultT")


class RemoteAbout(NamedTuple):
    """A kind of block as it was last used. `seen`: seconds since 1970 when a replica that uses it last looked."""

    model: str = ""
    codec: str = ""
    block_bytes: int = 0
    max_bytes: int = 0
    seen: float = 0.0


class RemoteTotals(NamedTuple):
    """Over all who share it. `blocks`: there now."""

    blocks: int = 0
    stored: int = 0
    evicted: int = 0
    healed: int = 0


def connect(url: str) -> Any:
    """A client of redis://HOST:PORT/DB, rediss://... or unix://PATH, which connects when it is first used. Raises
    TierUnavailable for a URL that is none."""
    try:
        return redis.Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
    except ValueError as error:
        raise TierUnavailable(f"remote: {error}") from error


def ask(call: Callable[[], ResultT]) -> ResultT:
    """What `call` returns. Raises TierUnavailable for any trouble that Redis makes."""
    try:
        return call()
    except redis.RedisError as error:
        raise TierUnavailable(f"Redis: {error}") from error


def kinds(client: Any) -> list[BlockHash]:
    """The keys of what this version keeps there. Raises TierUnavailable."""
    return sorted(ask(lambda: client.smembers(_REGISTRY)))


def other_formats(client: Any) -> list[int]:
    """Formats of other versions that have blocks there. Raises TierUnavailable."""
    found = ask(lambda: client.smembers(_FORMATS))
    return sorted(int(text) for text in found if text.isdigit() and int(text) != FORMAT)


class RemoteBooks:
    """The blocks with one `key`. Everything may raise TierUnavailable. Use from any thread."""

    def __init__(self, client: Any, key: BlockHash) -> None:
        self.key = key
        # What stands in braces decides on which server of a cluster a name lies.
        self.prefix = _REGISTRY + b":{" + key.hex().encode() + b"}:"
        self._client = client
        self._salt = key_salt(key)
        self._load = client.register_script(LOAD)
        self._store = client.register_script(STORE)
        self._mark = client.register_script(MARK)
        self._drop = client.register_script(DROP)
        self._shrink = client.register_script(SHRINK)

    def load(self, digest: BlockHash) -> bytes | None:
        """A block's encoded bytes, None when it is not there. Raises ValueError for one that is damaged."""
        value = self._run(self._load, digest, ABANDONED_AFTER)
        return None if value is None else self._verified(value, digest)

    def store(self, digest: BlockHash, payload: bytes, depth: int, session: int, bound: int) -> RemoteTotals:
        """Keeps a block, and at most `bound` in all."""
        value = payload_checksum(payload, digest, self._salt).to_bytes(SUM_BYTES, "little") + payload
        answer = self._run(self._store, value, digest, depth, session, bound, ABANDONED_AFTER)
        return RemoteTotals(0, *map(_number, answer))

    def mark(self, digests: Sequence[BlockHash], standing: int, expected: float, session: int) -> int:
        """`expected` on the monotonic clock. How many of the blocks are there."""
        seconds = max(0.0, expected - time.monotonic()) if expected else 0.0
        found = 0
        for start in range(0, len(digests), _MANY):
            found += self._run(self._mark, standing, seconds, session, *digests[start : start + _MANY])
        return found

    def drop(self, digests: Sequence[BlockHash], counted: str = "evicted") -> tuple[int, RemoteTotals]:
        """Throws blocks away. `counted`: as what, "" as nothing. How many were there, and the totals."""
        gone, totals = 0, RemoteTotals()
        for start in range(0, len(digests), _MANY):
            some, *counts = self._run(self._drop, counted, *digests[start : start + _MANY])
            gone, totals = gone + some, RemoteTotals(0, *map(_number, counts))
        return gone, totals

    def shrink(self, bound: int) -> int:
        """Gives up blocks, those worth least first, until `bound` are left. How many went."""
        gone = 0
        while some := self._run(self._shrink, bound, _MANY):
            gone += some
        return gone

    def digests(self) -> Iterator[BlockHash]:
        """Every block that is there all the while."""
        found = self._client.zscan_iter(self.prefix + b"used", count=1000)
        while (item := ask(lambda: next(found, None))) is not None:
            yield item[0]

    def verify(self) -> tuple[int, int]:
        """Reads every block; how many are sound, and how many were not and are gone."""
        sound = damaged = 0
        for digest in list(self.digests()):
            value = self._get(digest)
            try:
                if value is not None and self._verified(value, digest) is not None:
                    sound += 1
                else:
                    self.drop((digest,), "")  # Redis has thrown it away
            except ValueError:
                damaged += self.drop((digest,), "healed")[0]
        return sound, damaged

    def announce(self, about: RemoteAbout) -> RemoteTotals:
        """Says what this kind of block is, and that it is in use."""
        fields = {name: value for name, value in about._asdict().items() if name != "seen"} | {"seen": time.time()}
        pipeline = self._client.pipeline(transaction=False)
        pipeline.sadd(_FORMATS, FORMAT)
        pipeline.sadd(_REGISTRY, self.key)
        pipeline.hset(self.prefix + b"about", mapping=fields)
        pipeline.expire(self.prefix + b"about", ABANDONED_AFTER)
        return self._totals(pipeline)

    def totals(self) -> RemoteTotals:
        """What is there and was done."""
        return self._totals(self._client.pipeline(transaction=False))

    def about(self) -> RemoteAbout:
        """What was last announced; empty when nobody has."""
        found = ask(lambda: self._client.hmget(self.prefix + b"about", list(RemoteAbout._fields)))
        model, codec, block_bytes, max_bytes, seen = (each or b"" for each in found)
        return RemoteAbout(
            model.decode("utf-8", "replace"),
            codec.decode("utf-8", "replace"),
            _number(block_bytes),
            _number(max_bytes),
            _seconds(seen),
        )

    def forget(self) -> None:
        """Nothing is left of it but what somebody who uses it writes anew."""
        ask(lambda: self._client.delete(*(self.prefix + name for name in (b"used", b"order", b"until", b"meta", b"about"))))
        ask(lambda: self._client.srem(_REGISTRY, self.key))

    def _totals(self, pipeline: Any) -> RemoteTotals:
        pipeline.zcard(self.prefix + b"used")
        pipeline.hmget(self.prefix + b"about", ["stored", "evicted", "healed"])
        blocks, counts = ask(pipeline.execute)[-2:]
        return RemoteTotals(blocks, *map(_number, counts))

    def _get(self, digest: BlockHash) -> bytes | None:
        value: bytes | None = ask(lambda: self._client.get(self.prefix + digest))
        return value

    def _run(self, script: Any, *arguments: Any) -> Any:
        return ask(lambda: script(keys=[self.prefix + b"used"], args=[self.prefix, *arguments]))

    def _verified(self, value: bytes, digest: BlockHash) -> bytes:
        payload = value[SUM_BYTES:]
        if int.from_bytes(value[:SUM_BYTES], "little") != payload_checksum(payload, digest, self._salt):
            raise ValueError("its checksum is another one")
        return payload


def _number(text: bytes | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _seconds(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
