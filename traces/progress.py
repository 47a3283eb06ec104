"""Live progress of a replay: a line that moves on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from traces.replay import Replay

SECONDS_BETWEEN_LINES = 10.0


class _Figures(ProgressColumn):
    max_refresh = 0.25

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("figures", "")))


class ReplayProgress:
    """Shows `description`, turns done of `total`, cached share, tokens/s and failures while it is entered."""

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console = console
        self._description = description
        self._total = total
        self._done = 0
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Figures(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(description, total=total, figures="")

    def __enter__(self) -> ReplayProgress:
        if self._console.is_terminal:
            self._bar.start()
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def turn(self, replay: Replay | None = None) -> None:
        """One turn is over; figures come from `replay`."""
        self._done += 1
        figures = _figures(replay) if replay is not None else ""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, figures=figures)
        elif (now := time.monotonic()) >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            self._console.print(
                f"{self._description}: {self._done}/{self._total} turns{figures and ', '}{figures}", highlight=False
            )


def _figures(replay: Replay) -> str:
    result, elapsed = replay.result, replay.elapsed()
    parts = []
    if (share := result.cached_share) is not None:
        parts.append(f"{share:.0%} cached")
    if elapsed > 0:
        parts.append(f"{(result.prompt_tokens + result.output_tokens) / elapsed:,.0f} tokens/s")
    if result.failed:
        parts.append(f"{result.failed} failed")
    return ", ".join(parts)
