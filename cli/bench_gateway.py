"""`turnkeep bench gateway`: what a turn costs the gateway, beside what it costs other routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from cli.gateway_process import GatewayError, GatewayProcess, serve_command
from cli.json_file import JSON_OPTION
from cli.model import CACHE_OPTION, fetch
from engine.checkpoints import DEFAULT_MODEL, CheckpointError

if TYPE_CHECKING:
    from cli.gateway_bench.load import LoadConfig
    from cli.gateway_bench.report import SideReport

_BLOCK = 16


@click.command("gateway")
@click.option("--sessions", type=click.IntRange(1), default=4, show_default=True, help="Conversations, side by side.")
@click.option(
    "--at-once", type=click.IntRange(1), default=1, show_default=True, help="Conversations that take a turn at the same time."
)
@click.option("--pause", type=click.FloatRange(0, 60), default=0.0, show_default=True, help="Seconds before they do.")
@click.option("--turns", type=click.IntRange(2), default=100, show_default=True, help="Of each conversation.")
@click.option("--words", type=click.IntRange(1), default=960, show_default=True, help="Of each question; about a token each.")
@click.option("--output-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--stream/--no-stream", default=False, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True, help="Simulated ones, which take no time.")
@click.option(
    "--bare/--no-bare", default=True, show_default=True, help="Also measure a proxy that only parses bodies and passes them on."
)
@click.option("--vs", multiple=True, metavar="[NAME=]URL", help="Another router to take turns with; repeatable.")
@click.option("--ledger-off", is_flag=True, help="Also measure this gateway with --no-ledger.")
@click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME|DIR", help="Its tokenizer and template are used."
)
@CACHE_OPTION
@click.option("--serve-option", multiple=True, metavar="OPTION", help="Passed on to `turnkeep serve`; repeatable.")
@JSON_OPTION
def gateway_command(**options: Any) -> None:
    """Print processor time of a turn by stage, latency and memory of the gateway, for conversations that grow.

    Replicas are simulated and answer at once, so that what is left is the gateway. Stand-ins for the workers of other routers:
    python -m cli.gateway_bench.backend PORT... docs/benchmarks.md says what each figure means.
    """
    from rich.console import Console

    from cli.gateway_bench.load import LoadConfig, LoadError
    from cli.gateway_bench.peer import PeerError

    console = Console(stderr=True)
    config = LoadConfig(
        sessions=options["sessions"],
        turns=options["turns"],
        words=options["words"],
        output_tokens=options["output_tokens"],
        stream=options["stream"],
        pause=options["pause"],
        at_once=min(options["at_once"], options["sessions"]),
    )
    try:
        fetch(options["model"], options["cache_dir"].absolute(), console)
        reports = asyncio.run(_measure(config, options, console))
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except (GatewayError, LoadError, PeerError) as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _show(config, reports)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps([report.as_json() for report in reports], indent=1) + "\n")


async def _measure(config: LoadConfig, options: dict[str, Any], console: Any) -> list[SideReport]:
    from cli.gateway_bench.peer import bare_proxy
    from cli.gateway_bench.run import run
    from cli.gateway_bench.sides import Side, foreign_side

    tokens = (config.words + config.output_tokens + 32) * (config.turns + 2) * 5 // 4
    blocks = tokens * config.sessions // _BLOCK + 1024
    common = ["--simulate", "--replicas", str(options["replicas"]), "--num-blocks", str(blocks), "--log-level", "warning"]
    common += ["--max-model-len", str(max(tokens, 4096)), "--engine", "sim-time-scale=0", "--model", options["model"]]
    common += ["--cache-dir", str(options["cache_dir"].absolute()), *options["serve_option"]]
    others = [foreign_side(text) for text in options["vs"]]
    wanted = [("turnkeep", common)] + ([("ledger off", [*common, "--no-ledger"])] if options["ledger_off"] else [])
    async with AsyncExitStack() as stack:
        sides = []
        for name, arguments in wanted:
            gateway = await stack.enter_async_context(GatewayProcess(serve_command(*arguments)))
            sides.append(Side(name, gateway.url, gateway.pid, own=True))
        if options["bare"]:
            sides.append(await stack.enter_async_context(bare_proxy()))
        status = stack.enter_context(console.status("Starting")) if console.is_terminal else None

        def progress(turn: int) -> None:
            if status is not None:
                status.update(f"turn {turn} of {config.turns}")

        return await run(config, [*sides, *others], progress)


def _show(config: LoadConfig, reports: list[SideReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 160
    first = reports[0]
    console.print(
        f"{config.sessions} conversations of {config.turns} turns, mean body {first.body_bytes() / 1e3:,.0f} kB, at the end "
        f"{first.body_bytes([config.turns]) / 1e3:,.0f} kB and {max(t.prompt_tokens for t in first.turns):,} tokens"
    )
    marks = sorted({min(20, config.turns), config.turns})
    table = Table(title="a turn", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("router", no_wrap=True)
    at_marks = [f"at turn {mark}" for mark in marks]
    for header in ("CPU ms", *at_marks, "turns/s a core", "turns/s", "p50 ms", "p99 ms", "cached", "RSS MiB"):
        table.add_column(header, justify="right", no_wrap=True)
    window = [list(range(max(mark - 4, 1), mark + 1)) for mark in marks]
    for report in reports:
        figures = report.as_json()
        table.add_row(
            report.name,
            _number(report.cpu_ms()),
            *(_number(report.cpu_ms(turns)) for turns in window),
            _number(figures["turns_per_core_second_at_the_end"], 0),
            _number(figures["turns_per_second_at_the_end"], 0),
            _number(report.latency_ms(0.5)),
            _number(report.latency_ms(0.99)),
            f"{figures['cached_share']:.1%}",
            _number(report.rss / 2**20 if report.rss else None, 0),
        )
    console.print(table)
    _show_growth(reports, window)
    for report in reports:
        stages = report.stage_ms()
        if stages:
            console.print(f"{report.name}, ms by stage: " + ", ".join(f"{name} {value:.3f}" for name, value in stages.items()))


def _show_growth(reports: Sequence[SideReport], window: Sequence[Sequence[int]]) -> None:
    """What longer bodies cost each router, of which a bare proxy's share is the reading, parsing and sending of bytes."""
    if len(window) < 2:
        return
    grown = []
    for report in reports:
        early, late = report.cpu_ms(window[0]), report.cpu_ms(window[-1])
        if early is not None and late is not None:
            grown.append(f"{report.name} {late - early:+.2f} ms")
    more = reports[0].body_bytes(window[-1]) - reports[0].body_bytes(window[0])
    click.echo(f"growth from turn {window[0][-1]} to turn {window[-1][-1]}, {more / 1e3:,.0f} kB more: " + ", ".join(grown))


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
