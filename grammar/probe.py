"""Trying a compilation where it can be killed.

XGrammar cannot be interrupted. A helper process that has loaded the tokenizer forks a child for every trial; a child that is
not done by the deadline, or wants too much memory, dies alone. Trials run side by side and do not wait for each other, up to
`max_probes`.

Wire, both ways on the helper's stdin and stdout: 4 bytes of length (little-endian), then MessagePack.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO

import msgspec

from grammar.limits import GrammarLimits


class ProbeSetup(msgspec.Struct, frozen=True):
    """What the helper has to know before the first trial."""

    tokenizer_json: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    limits: GrammarLimits


class Trial(msgspec.Struct, frozen=True):
    """Compile this source."""

    number: int
    source: str


class Outcome(msgspec.Struct, frozen=True):
    """`problem` None: it compiled in time. Else the rest of a sentence that begins with "The grammar"."""

    number: int
    problem: str | None = None


class ProbeLost(Exception):  # noqa: N818 - it is an answer to the caller
    """The helper died or was closed before it answered. The text is the rest of a sentence that begins with "The grammar"."""


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes one message and flushes."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message's body, or None at the end of the stream. The stream may be unbuffered."""
    head = _read_exactly(stream, 4)
    return None if head is None else _read_exactly(stream, int.from_bytes(head, "little"))


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Prober:
    """The parent's side: starts the helper when it is first needed, and again when it died. Thread-safe."""

    def __init__(
        self, tokenizer_json: Path | str, vocab_size: int, stop_token_ids: tuple[int, ...], limits: GrammarLimits
    ) -> None:
        self._setup = ProbeSetup(str(Path(tokenizer_json).absolute()), vocab_size, stop_token_ids, limits)
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._closed = False

    def problem_with(self, source: str) -> str | None:
        """Tries a compilation. None when it ends in time, else the rest of a sentence that begins with "The grammar".

        Raises ProbeLost when there was no answer, which says nothing about the source.
        """
        return self._running().submit(source).result()

    def start(self) -> None:
        """Starts the helper, which takes seconds to load, before there is anything to try. Raises ProbeLost once closed."""
        self._running()

    def _running(self) -> _Helper:
        with self._lock:
            if self._closed:
                raise ProbeLost("cannot be tried any more: the engine is stopping")
            if self._helper is None or not self._helper.alive():
                self._helper = _Helper(self._setup)
            return self._helper

    def close(self) -> None:
        """Ends the helper and its children. Trials that are still running fail."""
        with self._lock:
            self._closed = True
            if self._helper is not None:
                self._helper.close()


class _Helper:
    """One helper process and the thread that reads its answers."""

    def __init__(self, setup: ProbeSetup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grammar.probe_helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent,
        )
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[str | None]] = {}
        self._numbers = 0
        self._broken = False
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The grammar probe has no pipes.")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._send(setup)
        threading.Thread(target=self._read, name="grammar-probe", daemon=True).start()

    def alive(self) -> bool:
        return not self._broken and self._process.poll() is None

    def submit(self, source: str) -> Future[str | None]:
        future: Future[str | None] = Future()
        with self._lock:
            if self._broken:
                future.set_exception(ProbeLost(_DIED))
                return future
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = future
        self._send(Trial(number, source))
        return future

    def _send(self, message: msgspec.Struct) -> None:
        try:
            with self._lock:
                write_message(self._stdin, message)
        except (OSError, ValueError):  # ValueError: closed meanwhile
            self._fail()

    def _read(self) -> None:
        while (body := read_message(self._stdout)) is not None:
            outcome = msgspec.msgpack.decode(body, type=Outcome)
            with self._lock:
                future = self._waiting.pop(outcome.number, None)
            if future is not None:
                future.set_result(outcome.problem)
        self._fail()

    def _fail(self) -> None:
        with self._lock:
            self._broken = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(ProbeLost(_DIED))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()  # the helper kills its children and leaves
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._fail()


_DIED = "could not be tried: the process that tries grammars died; send the request again"
