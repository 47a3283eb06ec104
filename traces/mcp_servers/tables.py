"""Questions about the CSV files of one directory: which tables, which columns, rows that match, sums and averages."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import click
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from traces.mcp_servers.schema import offer_choices

MAX_TABLE_BYTES = 16 << 20
MAX_ROWS_SHOWN = 12
MAX_GROUPS = 24
MAX_CELL = 80

Function = Literal["count", "sum", "mean", "min", "max"]


@dataclass(frozen=True)
class CsvTable:
    columns: list[str]
    rows: list[dict[str, str]]

    @classmethod
    def read(cls, path: Path) -> CsvTable:
        """Raises ValueError with a sentence for a file that is no table."""
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError(f"{path.name} is larger than {MAX_TABLE_BYTES} bytes")
        with open(path, encoding="utf-8", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
        if not reader.fieldnames:
            raise ValueError(f"{path.name} has no header line")
        return cls(list(reader.fieldnames), rows)

    def check(self, column: str) -> None:
        if column not in self.columns:
            raise ToolError(f"There is no column {column} here. Columns: {', '.join(self.columns)}.")

    def numbers(self, rows: list[dict[str, str]], column: str) -> list[float]:
        try:
            return [float(row[column]) for row in rows if row[column] != ""]
        except ValueError as error:
            raise ToolError(f"Column {column} holds text; only count works on it.") from error


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _apply(function: Function, values: list[float]) -> float | None:
    if not values:
        return None
    match function:
        case "count":
            return len(values)
        case "sum":
            return sum(values)
        case "mean":
            return fmean(values)
        case "min":
            return min(values)
        case "max":
            return max(values)


def build(directory: Path) -> MCPServer:
    """A server for the *.csv files of `directory`, read once. Raises ValueError and OSError."""
    tables = {path.stem: CsvTable.read(path) for path in sorted(directory.glob("*.csv"))}
    if not tables:
        raise ValueError(f"{directory} holds no .csv file")

    def get(table: str) -> CsvTable:
        if table not in tables:
            raise ToolError(f"There is no table {table}. Tables: {', '.join(tables)}.")
        return tables[table]

    def describe(table: str) -> str:
        """Show the columns of a table, how many rows it has, and its first rows."""
        found = get(table)
        sample = [", ".join(row[column][:MAX_CELL] for column in found.columns) for row in found.rows[:3]]
        return "\n".join([f"{table}: {len(found.rows)} rows", "columns: " + ", ".join(found.columns), *sample])

    def rows(table: str, column: str, equals: str) -> str:
        """Show the rows of a table in which a column equals a value."""
        found = get(table)
        found.check(column)
        matching = [row for row in found.rows if row[column].casefold() == equals.strip().casefold()]
        shown = [", ".join(row[name][:MAX_CELL] for name in found.columns) for row in matching[:MAX_ROWS_SHOWN]]
        more = [f"({len(matching) - len(shown)} more rows)"] if len(matching) > len(shown) else []
        return "\n".join([f"{len(matching)} rows; " + ", ".join(found.columns), *shown, *more])

    def summarise(table: str, function: Function, column: str, group_by: str) -> str:
        """Compute count, sum, mean, min or max of a column for each value of another column."""
        found = get(table)
        found.check(column)
        found.check(group_by)
        groups: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        for row in found.rows:
            groups[row[group_by]].append(row)
        figures: list[tuple[str, float]] = []
        for name, members in groups.items():
            value = len(members) if function == "count" else _apply(function, found.numbers(members, column))
            if value is not None:
                figures.append((name, value))
        figures.sort(key=lambda figure: (-figure[1], figure[0]))
        more = [f"({len(figures) - MAX_GROUPS} more groups)"] if len(figures) > MAX_GROUPS else []
        lines = [f"{name[:MAX_CELL]}: {_number(value)}" for name, value in figures[:MAX_GROUPS]]
        return "\n".join([f"{function} of {column} by {group_by}:", *lines, *more])

    columns = list(dict.fromkeys(column for table in tables.values() for column in table.columns))
    for tool in (describe, rows, summarise):
        offer_choices(tool, "table", list(tables), "Name of the table")
    for tool, parameter in ((rows, "column"), (summarise, "column"), (summarise, "group_by")):
        offer_choices(tool, parameter, columns, "Name of a column of the table")
    server = MCPServer("tables", log_level="WARNING")
    for tool in (describe, rows, summarise):
        server.add_tool(tool, structured_output=False)
    return server


@click.command()
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
def main(directory: Path) -> None:
    """Serve the tables of DIRECTORY over stdio."""
    try:
        server = build(directory)
    except (ValueError, OSError, csv.Error) as error:
        raise click.ClickException(f"{error}.") from error
    server.run("stdio")


if __name__ == "__main__":
    main()
