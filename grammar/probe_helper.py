"""The helper process of `grammar.probe`: loads a tokenizer, then forks a child for every compilation to be tried.

It has one thread, so forking is safe. Its own compiler is never used before a fork, so that no thread pool of XGrammar's
exists in the parent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO

import msgspec
import numpy as np
import xgrammar

from grammar.compiler import GrammarMatcher, allocate_bitmask, raw_compile, tokenizer_info
from grammar.lowering import error_text
from grammar.probe import Outcome, ProbeSetup, Trial, read_message, write_message

_READ_SIZE = 4096
_NICE = 5
"""Trials are for schemas that may never end, tokens of other callers are not."""
_DEAD_END = "comes to a place where nothing may follow and the text may not end; give every rule a way to end"
_TOO_MUCH_MEMORY = "takes too much memory to compile; send fewer or simpler tools"


@dataclass(slots=True)
class _Child:
    number: int
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""


class _Forker:
    def __init__(self, setup: ProbeSetup, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._limits = setup.limits
        self._stdin = stdin
        self._stdout = stdout
        self._tokens = tokenizer_info(setup.tokenizer_json, setup.vocab_size, setup.stop_token_ids)
        self._selector = selectors.DefaultSelector()
        self._selector.register(stdin, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}
        self._queue: deque[Trial] = deque()

    def run(self) -> None:
        """Serves until stdin closes; then nothing is left running."""
        try:
            while True:
                for key, _ in self._selector.select(self._timeout()):
                    if key.fileobj is self._stdin:
                        body = read_message(self._stdin)
                        if body is None:
                            return
                        self._queue.append(msgspec.msgpack.decode(body, type=Trial))
                    else:
                        self._hear(self._children[key.fd])
                self._kill_late()
                while self._queue and len(self._children) < self._limits.max_probes:
                    self._fork(self._queue.popleft())
        finally:
            for child in list(self._children.values()):
                self._end(child, kill=True)

    def _timeout(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - time.monotonic())

    def _fork(self, trial: Trial) -> None:
        pipe, child_pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(pipe)
            self._try_in_child(trial.source, child_pipe)
        os.close(child_pipe)
        child = _Child(trial.number, pid, pipe, time.monotonic() + self._limits.probe_deadline_seconds)
        self._children[pipe] = child
        self._selector.register(pipe, selectors.EVENT_READ)

    def _try_in_child(self, source: str, pipe: int) -> None:
        """Never returns. Says "ok" or what is wrong; says nothing when it dies."""
        said = b""
        try:
            limit = _address_space() + self._limits.probe_memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            # Processor time, of all its threads; nothing handles the signal, so it ends the child wherever it is.
            signal.setitimer(signal.ITIMER_PROF, self._limits.probe_processor_seconds)
            compiled = raw_compile(source, self._tokens, self._limits)
            said = self._walked(compiled).encode() or b"ok"
        except MemoryError:
            said = _TOO_MUCH_MEMORY.encode()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            said = f"cannot be compiled: {error_text(error)}".encode()[:2000]
        finally:
            with contextlib.suppress(OSError):
                os.write(pipe, said)
            os._exit(0)

    def _walked(self, compiled: xgrammar.CompiledGrammar) -> str:
        """What is wrong with its masks, along tokens that are drawn from them; "" where they are fast enough."""
        matcher = GrammarMatcher(xgrammar.GrammarMatcher(compiled), frozenset())
        mask = allocate_bitmask(1, self._tokens.info.vocab_size)
        random = Random(0)
        stops = list(self._tokens.info.stop_token_ids)
        spent = 0.0
        steps = 0
        while steps < self._limits.probe_steps:
            steps += 1
            begun = time.process_time()
            matcher.fill_bitmask(mask, 0)
            spent += time.process_time() - begun
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            if not bits[: self._tokens.info.vocab_size].any():
                return _DEAD_END
            bits[stops] = 0
            allowed = bits.nonzero()[0]
            if not len(allowed) or not matcher.accept(int(allowed[random.randrange(len(allowed))])):
                break
        if spent * 1000 / steps <= self._limits.max_mask_milliseconds:
            return ""
        return (
            f"takes {spent * 1000 / steps:.0f} ms a token, which would hold up other requests; "
            "write it with less repetition and fewer ways to read the same text"
        )

    def _hear(self, child: _Child) -> None:
        said = os.read(child.pipe, _READ_SIZE)
        if said:
            child.said += said
            return
        status = self._end(child, kill=False)
        if child.said == b"ok":
            problem = None
        elif child.said:
            problem = child.said.decode("utf-8", "replace")
        elif os.waitstatus_to_exitcode(status) == -signal.SIGPROF:
            problem = _too_long(self._limits.probe_processor_seconds)
        elif os.waitstatus_to_exitcode(status) == -signal.SIGSEGV:
            problem = "nests too deeply to be compiled; send simpler tools"
        else:
            problem = _TOO_MUCH_MEMORY
        write_message(self._stdout, Outcome(child.number, problem))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.deadline <= now]:
            self._end(child, kill=True)
            write_message(self._stdout, Outcome(child.number, _too_long(self._limits.probe_deadline_seconds)))

    def _end(self, child: _Child, *, kill: bool) -> int:
        """Forgets a child; returns how it exited, as waitpid says it."""
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        if kill:
            os.kill(child.pid, signal.SIGKILL)
        return os.waitpid(child.pid, 0)[1]


def _too_long(seconds: float) -> str:
    return f"takes more than {seconds:g} seconds to compile; send fewer or simpler tools"


def _address_space() -> int:
    """Bytes of address space that this process has now; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def main() -> None:
    """Reads a ProbeSetup and then trials from stdin. Nothing but outcomes goes to stdout."""
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered, so that select sees everything
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the outcomes
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair; stdin closes when it is gone
    body = read_message(stdin)
    if body is not None:
        _Forker(msgspec.msgpack.decode(body, type=ProbeSetup), stdin, stdout).run()


if __name__ == "__main__":
    main()
