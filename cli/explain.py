"""`turnkeep explain`: why the turns of recorded sessions reused less of their prefix than they could."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.model import CACHE_OPTION, fetch, own_name
from engine.checkpoints import DEFAULT_MODEL, CheckpointError
from gateway.config import ModelConfig
from gateway.models import ServedModel
from gateway.tokenization import ModelFilesError
from sessions.explain.misses import Advice, Miss, advice_from
from traces.explain import ExplainedTurn, Explainer
from traces.format import TraceFormatError
from traces.index import SessionEntry, expand_paths, index_files

_OF_TENANT = re.compile(r"[0-9a-f]{8}:(.*)", re.DOTALL)
_PIPE_WIDTH = 100_000


@click.command("explain")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--session",
    "sessions",
    multiple=True,
    metavar="NAME",
    help="Only these sessions, with or without what a recording puts before a name.",
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="NAME|DIR|FILE.gguf",
    help="Whose template and tokenizer count the tokens.",
)
@CACHE_OPTION
@click.option("--excerpts/--no-excerpts", default=True, show_default=True, help="Show both texts where they part.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0, min_open=True),
    help="Of prefill, for the seconds that a miss costs. [default: what the recording's own timings say]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON value instead of tables.")
def command(
    files: tuple[Path, ...],
    sessions: tuple[str, ...],
    model: str,
    cache_dir: Path,
    excerpts: bool,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Explain where recorded sessions stop reusing their prefix: which message, which byte, what kind of change.

    FILES are trajectories (docs/trajectory-format.md), or folders of them. Each turn is compared with the one before: what is
    lost is what any prefix cache would compute again. The cause evicted is the server's own count of cached tokens.
    """
    console = _console()
    try:
        entries = _chosen(index_files(expand_paths(files)), sessions)
        directory = fetch(model, cache_dir.absolute(), Console(stderr=True))
        explainer = Explainer(
            ServedModel.load(ModelConfig(own_name(model, directory), directory)),
            excerpts=excerpts,
            tokens_per_second=tokens_per_second,
        )
        found = [_explained(explainer, entry) for entry in entries]
    except (TraceFormatError, CheckpointError, ModelFilesError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
        return
    for turns in found:
        _print_session(console, turns)
    _print_summary(console, [turn for turns in found for turn in turns])


def _console() -> Console:
    """Standard output; what reads it through a pipe gets whole lines, however long."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def _chosen(entries: Sequence[SessionEntry], names: Sequence[str]) -> list[SessionEntry]:
    """The entries of these sessions, of all for no names. Where API keys are in use, recordings put the beginning of a tenant's
    digest before a name: `555d6577:fix-bug`. The bare name is taken where only one tenant has it. Raises click.UsageError."""
    if not names:
        return list(entries)
    known = {entry.session for entry in entries}
    wanted = set()
    for name in names:
        found = {name} & known or {other for other in known if (match := _OF_TENANT.match(other)) and match[1] == name}
        if not found:
            raise click.UsageError(f"There is no session {name} in these files.")
        if len(found) > 1:
            raise click.UsageError(f"Sessions of several API keys are called {name}; say which: {', '.join(sorted(found))}.")
        wanted |= found
    return [entry for entry in entries if entry.session in wanted]


def _explained(explainer: Explainer, entry: SessionEntry) -> list[ExplainedTurn]:
    return list(explainer.session(entry.session, entry.read()))


def _misses(turns: Iterable[ExplainedTurn]) -> list[Miss]:
    return [turn.miss for turn in turns if turn.miss is not None]


def _as_json(found: Sequence[Sequence[ExplainedTurn]]) -> list[dict[str, object]]:
    return [
        {
            "session": turns[0].session,
            "turns": [
                {
                    "turn": turn.turn,
                    "prompt_tokens": turn.prompt_tokens,
                    "shared_tokens": turn.shared_tokens,
                    "miss": msgspec.to_builtins(turn.miss) if turn.miss is not None else None,
                    "problem": turn.problem,
                }
                for turn in turns
            ],
            "advice": [msgspec.to_builtins(advice) for advice in advice_from(_misses(turns))],
        }
        for turns in found
        if turns
    ]


def _print_session(console: Console, turns: Sequence[ExplainedTurn]) -> None:
    for turn in turns:
        if turn.problem is not None:
            console.print(f"[bold]{escape(turn.session)}[/bold] turn {turn.turn}: {escape(turn.problem)}", highlight=False)
        miss = turn.miss
        if miss is None:
            continue
        cost = f"{miss.lost_tokens} of {turn.prompt_tokens} tokens again"
        if miss.lost_seconds is not None:
            cost += f", about {miss.lost_seconds:.2f} s"
        place = (
            f" at {miss.path} byte {miss.field_bytes} (prompt: byte {miss.text_bytes}, token {miss.tokens})"
            if miss.path
            else ""
        )
        console.print(
            f"[bold]{escape(turn.session)}[/bold] turn {turn.turn}: [yellow]{miss.cause}[/yellow]{escape(place)}: {cost}",
            highlight=False,
        )
        for sign, text in (("-", miss.before), ("+", miss.after)):
            if text:
                console.print(f"    {sign} {text}", highlight=False, markup=False, soft_wrap=True)
    for advice in advice_from(_misses(turns)):
        console.print(f"    [green]advice:[/green] {escape(_sentence(advice))}", highlight=False, soft_wrap=True)


def _sentence(advice: Advice) -> str:
    saved = f", {advice.saved_seconds_per_turn:.2f} s" if advice.saved_seconds_per_turn is not None else ""
    return f"{advice.text}{saved}; seen {advice.times} times."


def _print_summary(console: Console, turns: Sequence[ExplainedTurn]) -> None:
    by_cause: dict[str, list[Miss]] = defaultdict(list)
    for miss in _misses(turns):
        by_cause[miss.cause].append(miss)
    total = sum(turn.prompt_tokens for turn in turns)
    table = Table(title=f"{len(turns)} turns, {total} prompt tokens")
    for column, justify in (("cause", "left"), ("misses", "right"), ("tokens again", "right"), ("seconds", "right")):
        table.add_column(column, justify="left" if justify == "left" else "right")
    for cause, misses in sorted(by_cause.items(), key=lambda item: -sum(miss.lost_tokens for miss in item[1])):
        seconds = [miss.lost_seconds for miss in misses if miss.lost_seconds is not None]
        shown = f"{sum(seconds):.2f}" if seconds else ""
        table.add_row(cause, str(len(misses)), str(sum(miss.lost_tokens for miss in misses)), shown)
    if not by_cause:
        console.print(f"{len(turns)} turns, {total} prompt tokens: every turn reuses all that the one before left.")
        return
    console.print(table)
