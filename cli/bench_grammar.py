"""`turnkeep bench grammar`: what is enforced of JSON Schema, what grammars cost a token, and calls of the real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.gateway_process import GatewayError
from cli.json_file import JSON_OPTION
from cli.model import CACHE_OPTION, fetch
from engine.checkpoints import DEFAULT_MODEL, CheckpointError
from grammar.formats.registry import FORMAT_NAMES

if TYPE_CHECKING:
    from cli.grammar_bench.report import CallsReport
    from grammar.bench.cost import TokenCost
    from grammar.bench.suite import KeywordRow


@click.command("grammar")
@click.option(
    "--suite",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A draft's folder of the JSON-Schema-Test-Suite; repeatable.",
)
@click.option(
    "--tools",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE|DIR",
    help="Lists of tools, as MCP servers or OpenAI's API write them; repeatable. [default: those of the bundled sessions]",
)
@click.option("--list-size", type=click.IntRange(1), default=50, show_default=True, help="Tools in the list that is compiled.")
@click.option("--calls", type=click.IntRange(0), default=0, show_default=True, help="Calls to have the real model write.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=3600.0, show_default=True, help="After which --calls ends as it is."
)
@click.option(
    "--walks", type=click.IntRange(0), default=0, show_default=True, help="Calls to be made of random allowed tokens."
)
@click.option("--temperature", type=click.FloatRange(0, 2), default=1.3, show_default=True, help="Of those calls.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(FORMAT_NAMES),
    help="How calls are written; repeatable, and each takes an equal share of --calls. [default: hermes; the list is compiled "
    "in all of them]",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the answers to --calls in this file, and go on after those that it holds.",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME|DIR", help="Whose vocabulary is used.")
@CACHE_OPTION
@click.option("--serve-option", multiple=True, metavar="OPTION", help="Passed on to `turnkeep serve` for --calls; repeatable.")
@JSON_OPTION
def grammar_command(**options: Any) -> None:
    """Print which keywords are enforced, checked or refused, and the cost of masks and of compiling a list of tools.

    With --walks calls are made of random allowed tokens; with --calls the model writes them through the whole gateway at a high
    temperature. Each finished one is validated against its full schema. docs/benchmarks.md says what each figure means.
    """
    from rich.console import Console

    from cli.grammar_bench.tools import ToolsError, read_tools

    console = Console(stderr=True)
    out = Console()
    if not out.is_terminal:
        out.width = 160
    written: dict[str, Any] = {}
    try:
        directory = fetch(options["model"], options["cache_dir"].absolute(), console)
        tools = read_tools(options["tools"])
        compiler = _compiler(directory)
        try:
            for suite in options["suite"]:
                from grammar.bench.suite import run_suite

                rows = list(run_suite(suite, compiler))
                _show_suite(out, suite, rows)
                written[f"suite {suite.name}"] = [_row_json(row) for row in rows]
            if options["walks"]:
                written["walks"] = _walks(out, directory, compiler, tools, options["walks"])
            written["cost"] = _cost(out, directory, compiler, tools, options["list_size"], options["formats"] or FORMAT_NAMES)
        finally:
            compiler.close()
        if options["calls"]:
            from cli.grammar_bench.calls import Plan, generate_calls

            formats = tuple(dict.fromkeys(options["formats"])) or ("hermes",)
            plan = Plan(options["calls"], options["temperature"], formats, options["seconds"], options)
            report = asyncio.run(generate_calls(tools, plan, console))
            _show_calls(out, report)
            written["calls"] = report.as_json()
    except (CheckpointError, GatewayError, ToolsError) as error:
        raise click.ClickException(str(error)) from error
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(written, indent=1) + "\n")


def _compiler(directory: Path) -> Any:
    from grammar.compiler import GrammarCompiler

    size, stops = _vocabulary(directory)
    return GrammarCompiler(directory / "tokenizer.json", size, stops)


def _vocabulary(directory: Path) -> tuple[int, tuple[int, ...]]:
    """Width of the logits and the tokens that end a generation."""
    from gateway.config import ModelConfig
    from gateway.models import ServedModel

    model = ServedModel.load(ModelConfig("model", directory))
    config = json.loads((directory / "config.json").read_bytes())
    return int(config.get("vocab_size", model.tokenizer.size)), tuple(sorted(model.tokenizer.eos_token_ids))


def _show_suite(out: Any, suite: Path, rows: list[KeywordRow]) -> None:
    from rich.table import Table

    table = Table(title=f"JSON-Schema-Test-Suite, {suite.name}", title_justify="left", box=None, pad_edge=False)
    table.add_column("keyword", no_wrap=True)
    headers = ("schemas", "enforced", "checked", "refused", "invalid tried", "let through", "valid tried", "not written")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        figures = (row.schemas, row.enforced, row.checked, row.refused, row.invalid, len(row.leaks), row.valid, row.narrow)
        table.add_row(row.keyword, *map(str, figures))
    totals = [sum(column) for column in zip(*(_figures(row) for row in rows), strict=True)]
    table.add_row("[bold]all", *(f"[bold]{figure}" for figure in totals))
    out.print(table)
    for row in rows:
        for leak in row.leaks:
            out.print(f"let through: {row.keyword}: {leak}", markup=False)


def _figures(row: KeywordRow) -> tuple[int, ...]:
    return row.schemas, row.enforced, row.checked, row.refused, row.invalid, len(row.leaks), row.valid, row.narrow


def _row_json(row: KeywordRow) -> dict[str, Any]:
    names = ("schemas", "enforced", "checked", "refused", "invalid", "let_through", "valid", "not_written")
    return {"keyword": row.keyword, **dict(zip(names, _figures(row), strict=True)), "relaxed": row.relaxed}


def _cost(out: Any, directory: Path, compiler: Any, tools: list[Any], size: int, formats: Sequence[str]) -> dict[str, Any]:
    """Prints and returns what the list costs to compile in these formats, and a token of it to mask."""
    from cli.grammar_bench.tools import of_size
    from cli.grammar_bench.walks import random_calls
    from grammar.bench.cost import compile_milliseconds, token_cost
    from grammar.formats.registry import format_named
    from grammar.tools import GrammarRefused, ToolChoice

    listed = of_size(tools, size)
    choice = ToolChoice("required")
    out.print(f"\na list of {len(listed)} tools, milliseconds at its first use and at its second (medians of 3):")
    by_format: dict[str, Any] = {}
    for name in formats:
        try:
            source = format_named(name).structural_tag(listed, choice)
        except GrammarRefused as refused:
            out.print(f"  {name}: refused: {refused.message}", markup=False)
            continue
        if source is None:
            raise ValueError("there are no tools to compile")
        first, second = compile_milliseconds(lambda: _compiler(directory), source, 3)
        by_format[name] = {"first_ms": first, "second_ms": second}
        out.print(f"  {name}: {first:,.0f}, {second:,.2f}")
    width, stops = _vocabulary(directory)
    source = format_named("hermes").structural_tag(listed, choice)
    if source is None:
        raise ValueError("there are no tools to compile")
    walks = random_calls(directory / "tokenizer.json", compiler.compile(source), width, stops, count=24)
    cost: TokenCost = token_cost(compiler.compile(source), walks, width)
    out.print(
        f"a token of its calls in hermes, microseconds at p50 / p99: mask {cost.fill.p50:,.1f} / {cost.fill.p99:,.1f}, "
        f"advance {cost.advance.p50:,.1f} / {cost.advance.p99:,.1f}, both {cost.both.p50:,.1f} / {cost.both.p99:,.1f} "
        f"({cost.both.count:,} tokens)"
    )
    return {
        "tools": len(listed),
        "formats": by_format,
        "both_us_p50": cost.both.p50,
        "both_us_p99": cost.both.p99,
        "tokens": cost.both.count,
    }


def _walks(out: Any, directory: Path, compiler: Any, tools: list[Any], count: int) -> dict[str, Any]:
    from cli.grammar_bench.walks import walked_calls

    width, stops = _vocabulary(directory)
    report = walked_calls(directory / "tokenizer.json", compiler, width, stops, tools, count)
    _show_calls(out, report)
    return report.as_json()


def _show_calls(out: Any, report: CallsReport) -> None:
    out.print(
        f"\ncalls of {report.model} at temperature {report.temperature:g}: {report.finished:,} finished, "
        f"of {len(report.called)} of {report.tools} tools; neither valid nor warned of: {len(report.wrong)}"
    )
    for name, count in report.formats.items():
        out.print(
            f"  {name}: {count.finished:,} finished ({count.cut:,} more were cut), {count.valid:,} valid against their schema, "
            f"{count.checked:,} not and warned of; {count.warned:,} carried a warning"
        )
    for wrong in report.wrong[:10]:
        out.print(f"wrong: {wrong}", markup=False)
