"""The loop that steps an engine, on a thread of its own. `engine.thread` is its other half, on the event loop.

The thread sleeps on a condition while there is neither work nor a command. Between steps it runs the commands that were
posted, so an abort or a new request waits for one step at most; what a step changed is handed over in one piece.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from engine.core import EngineCore, RequestRefused
from engine.server.stream import RequestStream
from gateway.workers.protocol import Chunk, Done, Failed, RetentionHint, Tokens, WorkerStats
from prefix_cache.events import KVEvent
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

News = Callable[[], None]

_LAST_LOOK = 2.0
"""Seconds after everything came to rest: what tiers say of themselves may be a second old when it does, and stores go on."""


@runtime_checkable
class Interruptible(Protocol):
    """A core whose `step` may wait without working (the simulated one)."""

    def interrupt(self) -> None:
        """From any thread: makes a step that waits return early, so that commands get through."""


@runtime_checkable
class Newsworthy(Protocol):
    """A core that may have something to do, or to tell, without a step or a command."""

    def on_news(self, callback: Callable[[], None]) -> None:
        """`callback` is called when that may be; from any thread."""


@runtime_checkable
class Timed(Protocol):
    """A core that may have work to do because time has passed."""

    def wakes_in(self) -> float | None:
        """Seconds after which to look at it again; None: when something happens."""


@runtime_checkable
class Drainable(Protocol):
    """A core that goes on differently when it will get no more requests."""

    def drain(self) -> None:
        """No more will come."""


class StepListener(Protocol):
    """What the loop reports. Its methods are called where `deliver` runs the news, in the order things happened."""

    def on_added(self, stream: RequestStream, refusal: RequestRefused | None) -> None:
        """The core has queued a request, or refused it."""

    def on_step(self, produced: list[tuple[RequestStream, Chunk]], at: float) -> None:
        """What a step produced that ended at `at` on the monotonic clock."""

    def on_events(self, events: list[KVEvent]) -> None:
        """KV events since the last report."""

    def on_snapshot(self, tiers: dict[str, bytes]) -> None:
        """All that can be found now, as `EngineCore.snapshot`; the events up to here were reported before."""

    def on_stats(self, stats: WorkerStats, step_seconds: float | None) -> None:
        """Load and totals now; how long the step took that has ended since the last report, if one has."""

    def on_lost(self, streams: list[RequestStream]) -> None:
        """The step that held these requests raised, or the core could not queue them. They are dropped, the engine goes on."""

    def on_fatal(self, message: str) -> None:
        """The engine cannot go on and the thread ends."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """More than `max_step_failures` failed steps within `window` seconds, none between them that gave a token, mean that the
    engine is broken. A step has failed when it raised, or when the engine says so of the requests in it (`engine_error`); a
    request that could not be queued counts the same."""

    max_step_failures: int = 3
    window: float = 60.0


class StepLoop:
    """Owns `core` from `start` on. `post` and `stop` may be called from any thread, all else happens on the loop's.

    `deliver` is called on the loop's thread with news to be run elsewhere, in order; it must not block. It raises
    RuntimeError when nobody is there any more, which ends the loop.
    """

    def __init__(
        self,
        core: EngineCore[Any],
        listener: StepListener,
        deliver: Callable[[list[News]], None],
        failures: FailurePolicy,
        debug_integrity: bool,
    ) -> None:
        self._core = core
        self._listener = listener
        self._deliver = deliver
        self._policy = failures
        self._debug_integrity = debug_integrity
        self._interrupt: Callable[[], None] = core.interrupt if isinstance(core, Interruptible) else _nothing
        self._wakes_in: Callable[[], float | None] = core.wakes_in if isinstance(core, Timed) else _never
        self._condition = threading.Condition()
        self._commands: list[Callable[[], Any]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._news: list[News] = []
        self._active: dict[str, RequestStream] = {}
        self._failures: deque[float] = deque(maxlen=failures.max_step_failures + 1)
        self._step_began: float | None = None
        self._step_seconds = 0.0  # of the step under way, which may be several calls when it is interrupted
        self._steps_total = 0
        self._looks_at: float | None = None  # None: nothing has happened since the last look
        if isinstance(core, Newsworthy):
            core.on_news(self._look_again)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, command: Callable[[], Any]) -> None:
        """Has `command` run on the engine thread before its next step. A command that raises ends the engine."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()
        self._interrupt()

    def _look_again(self) -> None:
        """From any thread. The loop looks at the core and tells what there is to tell."""
        with self._condition:
            if not self._commands:
                self._commands.append(_nothing)
                self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after the commands posted so far and the step that runs."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._interrupt()

    def join(self, timeout: float) -> bool:
        """Waits for the thread. False when it does not end in `timeout` seconds (it is a daemon: it may be left behind)."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def step_seconds(self) -> float:
        """From any thread: for how long the step that runs now has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    # Commands: to be posted, never called.

    def add(self, stream: RequestStream, prepared: Any) -> None:
        """Queues a prepared request. Its chunks are reported under `stream`, since ids may come again."""
        refusal = None
        try:
            self._core.add(prepared)
            self._active[stream.request_id] = stream
        except RequestRefused as error:
            refusal = error
        except Exception:
            logger.exception("a request could not be queued")
            self._core.abort(stream.request_id)  # whatever of it had got in
            self.tell(functools.partial(self._listener.on_lost, [stream]))
            self._core.check_integrity()
            self._count_failure()
            return
        self.tell(functools.partial(self._listener.on_added, stream, refusal))

    def abort(self, request_id: str) -> bool:
        """Drops a request."""
        self._active.pop(request_id, None)
        return self._core.abort(request_id)

    def snapshot(self) -> None:
        """Reports a snapshot."""
        # It includes events that were not taken yet: report those first, so that both sides number them the same.
        self._tell_events()
        self.tell(functools.partial(self._listener.on_snapshot, self._core.snapshot()))

    def supersede(self, digests: Sequence[BlockHash]) -> int:
        """Has blocks evicted before all others."""
        return self._core.supersede(digests)

    def retain(self, hints: Sequence[RetentionHint]) -> None:
        """Passes on what gateways say of sessions."""
        self._core.retain(hints)

    def drain(self) -> None:
        """Tells the core that no more requests will come."""
        if isinstance(self._core, Drainable):
            self._core.drain()

    def check_integrity(self) -> None:
        """Checks the core's books."""
        self._core.check_integrity()

    def tell(self, news: News) -> None:
        """Adds to what is delivered after the commands of this round."""
        self._news.append(news)

    # The thread.

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command()
                if commands:
                    self._flush()
                if self._core.has_work():
                    self._step()
                    self._flush()
                elif not commands:
                    self._flush()  # the last look
                    self._looks_at = None
        except Exception as error:
            logger.exception("the engine has failed and cannot go on")
            message = f"The engine has failed and cannot go on: {error or type(error).__name__}"
            self.tell(functools.partial(self._listener.on_fatal, message))
            self._send()

    def _next_commands(self) -> list[Callable[[], Any]] | None:
        """What was posted since the last call. Waits while there is nothing to do, but for one last look at the core some time
        after it came to rest; None when the thread is to end."""
        if self._debug_integrity and not self._core.has_work():
            self._core.check_integrity()
        with self._condition:
            while not self._commands and not self._stopping and not self._core.has_work():
                wait = self._wakes_in()
                if self._looks_at is not None:
                    look = self._looks_at - time.monotonic()
                    if look <= 0:
                        break
                    wait = look if wait is None else min(wait, look)
                self._condition.wait(wait)
            commands, self._commands = self._commands, []
            return None if self._stopping and not commands else commands

    def _step(self) -> None:
        self._step_began = began = time.monotonic()
        try:
            produced = self._core.step()
        except Exception:
            logger.exception("a step of the engine failed")
            self._recover()
            return
        finally:
            self._step_began = None
        at = time.monotonic()
        self._step_seconds += at - began
        addressed = []
        failed = gave_tokens = False
        for request_id, chunk in produced:
            ends = isinstance(chunk, Done | Failed)
            failed = failed or (isinstance(chunk, Failed) and chunk.code == "engine_error")
            gave_tokens = gave_tokens or isinstance(chunk, Tokens)
            stream = self._active.pop(request_id, None) if ends else self._active.get(request_id)
            if stream is not None:
                addressed.append((stream, chunk))
        self.tell(functools.partial(self._listener.on_step, addressed, at))
        if gave_tokens:
            self._failures.clear()
        elif failed:
            self._count_failure()

    def _recover(self) -> None:
        """After a step that raised: fails what was running. Raises when the engine cannot be trusted any more."""
        lost = list(self._active.values())
        for stream in lost:
            self.abort(stream.request_id)
        self.tell(functools.partial(self._listener.on_lost, lost))
        self._core.check_integrity()
        self._count_failure()

    def _count_failure(self) -> None:
        now = time.monotonic()
        self._failures.append(now)
        if len(self._failures) > self._policy.max_step_failures and now - self._failures[0] <= self._policy.window:
            raise RuntimeError(f"{len(self._failures)} steps failed within {now - self._failures[0]:.1f} seconds")

    def _flush(self) -> None:
        self._tell_events()
        stats = self._core.stats()
        seconds = None
        if stats.steps_total != self._steps_total:
            seconds, self._step_seconds = self._step_seconds, 0.0
            self._steps_total = stats.steps_total
        self.tell(functools.partial(self._listener.on_stats, stats, seconds))
        self._looks_at = time.monotonic() + _LAST_LOOK
        self._send()

    def _tell_events(self) -> None:
        events = self._core.take_events()
        if events:
            self.tell(functools.partial(self._listener.on_events, events))

    def _send(self) -> None:
        news, self._news = self._news, []
        try:
            self._deliver(news)
        except RuntimeError:
            logger.warning("nobody listens to the engine any more; it stops")
            with self._condition:
                self._stopping = True
                self._commands.clear()


def _nothing() -> None:
    pass


def _never() -> None:
    return None
