"""Checks beside the event loop, in a process that can be killed: patterns and large schemas can take for ever.

The process is started when something has to be checked first, and again after it was killed. Wire on its stdin and stdout: 4
bytes of length (little-endian), then MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

_MAX_WAITING = 64
_START_SECONDS = 10.0
"""What a check may take longer for which the process has to be started: a second, and more on a busy machine."""
_ROOT = Path(__file__).resolve().parents[2]


class Work(msgspec.Struct, frozen=True):
    """Check `text` against the JSON text of a schema."""

    schema: bytes
    text: str


class Result(msgspec.Struct, frozen=True):
    """`state` unknown: it could not be checked; `found` says why."""

    state: Literal["valid", "invalid", "unknown"]
    found: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """`seconds`: for one check, waiting for those before it included. `bytes`: larger texts are not checked."""

    seconds: float = 2.0
    bytes: int = 8 << 20


class Checker:
    """One process, one check at a time. Use on one event loop; `close` ends the process."""

    def __init__(self, limits: CheckLimits = CheckLimits()) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def check(self, schema: Mapping[str, Any] | bool, text: str) -> Result:
        """Never raises for what it is given."""
        try:
            work = msgspec.msgpack.encode(Work(msgspec.json.encode(schema), text))
        except (TypeError, ValueError, RecursionError) as error:
            return Result("unknown", (f"the schema cannot be written: {error}",))
        if len(work) > self._limits.bytes or self._waiting >= _MAX_WAITING:
            return Result("unknown", ("there is too much to check",))
        self._waiting += 1
        starting = self._process is None or self._process.returncode is not None
        try:
            async with asyncio.timeout(self._limits.seconds + _START_SECONDS * starting):
                async with self._lock:
                    return await self._exchange(work)
        except TimeoutError:
            return Result("unknown", (f"the check took more than {self._limits.seconds:g} seconds",))
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            self.close()
            return Result("unknown", ("the process that checks died",))
        finally:
            self._waiting -= 1

    async def _exchange(self, work: bytes) -> Result:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "grammar.checking.helper",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=_ROOT,
            )
        if process.stdin is None or process.stdout is None:
            raise OSError("the checking process has no pipes")
        finished = False
        try:
            process.stdin.write(len(work).to_bytes(4, "little") + work)
            await process.stdin.drain()
            head = await process.stdout.readexactly(4)
            body = await process.stdout.readexactly(int.from_bytes(head, "little"))
            finished = True
        finally:
            if not finished:  # it still works on this, or is broken: the next check gets another process
                self._process = None
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return msgspec.msgpack.decode(body, type=Result)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            transport = getattr(process, "_transport", None)  # else it complains when its loop is gone before it
            if transport is not None:
                transport.close()
