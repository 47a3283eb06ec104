"""`turnkeep replay`: recorded agent sessions against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from traces.chat_client import ChatClient, ChatError, normalise_url
from traces.format import TraceFormatError
from traces.index import SessionEntry, expand_paths, index_files
from traces.progress import ReplayProgress
from traces.replay import Goodput, Replay, ReplayConfig, ReplayResult, choose_model, open_http
from traces.report import Run, table, to_json
from traces.unlimited_cache import Bound, TooManyBlocks, unlimited_bound

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a replay."""

    urls: tuple[str, ...]
    api_key: str | None
    timeout: float


async def replay(
    entries: Sequence[SessionEntry],
    target: Target,
    config: ReplayConfig,
    *,
    name: str,
    console: Console,
    with_bound: bool,
    runs: list[Run],
) -> None:
    """Replays and adds the run to `runs`, also when it is cancelled. Raises ChatError when a server cannot be reached."""
    turns = sum(entry.turns for entry in entries)
    async with open_http(config.concurrency) as http:
        clients = [ChatClient(http, url, api_key=target.api_key, timeout=target.timeout) for url in target.urls]
        model = config.model or await choose_model(clients[0], entries)
        for client in clients[1:]:
            await client.models()
        progress = ReplayProgress(console, name, turns)
        run = Replay(dataclasses.replace(config, model=model), clients, lambda: progress.turn(run))
        try:
            with progress:
                await run.run(entries)
        except BaseException:
            run.result.duration = run.elapsed()
            runs.append(Run(name, run.result))
            raise
        bound = await _bound(clients[0], entries, run.result, model, console, turns) if with_bound else None
        runs.append(Run(name, run.result, bound))


async def _bound(
    client: ChatClient, entries: Sequence[SessionEntry], result: ReplayResult, model: str, console: Console, turns: int
) -> Bound | None:
    progress = ReplayProgress(console, "tokenising", turns)
    try:
        with progress:
            return await unlimited_bound(client, entries, result.answers, model=model, on_turn=progress.turn)
    except (ChatError, TooManyBlocks) as error:
        console.print(f"What one unlimited cache would give is not known: {error}", style="yellow", highlight=False)
        return None


def _parse_goodput(values: Sequence[str]) -> Goodput:
    limits = [limit for value in values for limit in value.replace(",", " ").split()]
    try:
        return Goodput.parse(limits)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--goodput") from error


def _check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(normalise_url(url) for url in urls)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from error


def write_json(path: str, run: Run) -> None:
    """Writes a run's figures to a file, or to standard output for `-`. Raises click.ClickException."""
    text = json.dumps(to_json(run), indent=2) + "\n"
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"The figures cannot be written to {path}: {error.strerror or error}.") from error


@click.command(name="replay")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=("http://127.0.0.1:8000",),
    show_default=True,
    help="Server; with several, sessions are dealt to them in turn.",
)
@click.option(
    "--model", help="Name of the model to ask for. Default: the recorded one where the server has it, else its first."
)
@click.option("--api-key", help="Sent as a bearer token.")
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=8, show_default=True, help="Sessions side by side.")
@click.option(
    "--gap-scale",
    type=click.FloatRange(0, 1000),
    default=1.0,
    show_default=True,
    help="Multiplies the recorded tool gaps; 0 leaves them out.",
)
@click.option("--free", is_flag=True, help="Let the model end its answers as it likes, with the recorded sampling fields.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="LIMIT:MS",
    help="Limits a good turn keeps: ttft:500, tpot:50, e2el:2000 (milliseconds).",
)
@click.option(
    "--no-bound", is_flag=True, help="Do not work out what one unlimited cache would give (it tokenises everything once more)."
)
@click.option(
    "--timeout", type=click.FloatRange(1, 86_400), default=600.0, show_default=True, help="Seconds a server may be silent."
)
@click.option("--session-prefix", default="", help="Put before every session's name.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write the figures there too; - is standard output, the table then goes to standard error.",
)
def command(
    files: tuple[Path, ...],
    urls: tuple[str, ...],
    model: str | None,
    api_key: str | None,
    concurrency: int,
    gap_scale: float,
    free: bool,
    goodput: tuple[str, ...],
    no_bound: bool,
    timeout: float,
    session_prefix: str,
    json_path: str | None,
) -> None:
    """Replay recorded agent sessions against OpenAI-compatible servers and print what they measured.

    FILES are trajectories (docs/trajectory-format.md), or folders of them. Sessions run side by side, the turns of each in
    order; the history is the recorded one, and answers get their recorded length. Ends with status 1 when a turn failed.
    """
    config = ReplayConfig(
        concurrency=concurrency,
        gap_scale=gap_scale,
        forced=not free,
        model=model,
        goodput=_parse_goodput(goodput),
        session_prefix=session_prefix,
    )
    target = Target(_check_urls(urls), api_key, timeout)
    console = Console(stderr=True)
    runs: list[Run] = []
    interrupted = False
    try:
        entries = index_files(expand_paths(files))
        asyncio.run(replay(entries, target, config, name="replay", console=console, with_bound=not no_bound, runs=runs))
    except (TraceFormatError, ChatError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        interrupted = True
    for run in runs:
        (console if json_path == "-" else Console()).print(table([run]))
        for sentence in run.result.errors:
            console.print(sentence, style="red", highlight=False, markup=False)
        if (left_out := run.result.failed - len(run.result.errors)) > 0:
            console.print(f"... and {left_out} more", style="red", highlight=False)
        if json_path is not None:
            write_json(json_path, run)
    if interrupted:
        console.print("Interrupted: these figures cover what was replayed until then.", style="yellow")
        sys.exit(INTERRUPTED)
    if any(run.result.failed for run in runs):
        sys.exit(1)
