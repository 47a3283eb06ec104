"""What became of the calls that were generated: counted, kept in a file, and found there again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from grammar.checking.validate import NotCheckable, violations

NOTHING = {"type": "object", "additionalProperties": False}
"""What the arguments of a tool without parameters are."""

Outcome = Literal["valid", "checked", "wrong", "cut"]


class Call(msgspec.Struct, frozen=True):
    """One call. `outcome`: `valid` against its full schema; `checked`: it is not, and the caller was warned of the keywords
    that were not enforced; `wrong`: it is not, or is no JSON, and nobody was warned; `cut`: by max_tokens. `said`: what is
    wrong."""

    name: str
    arguments: str
    outcome: Outcome
    warned: bool = False
    said: str = ""


def judged(name: str, arguments: str, schema: Any, *, warned: bool) -> Call:
    """A finished call. `warned`: the caller was told that keywords of its tool were not enforced."""
    try:
        json.loads(arguments)
        found = violations(schema, arguments)
    except (ValueError, NotCheckable) as error:
        return Call(name, arguments, "wrong", warned, str(error))
    if not found:
        return Call(name, arguments, "valid", warned)
    return Call(name, arguments, "checked" if warned else "wrong", warned, found[0])


class Batch(msgspec.Struct, frozen=True):
    """The calls of one request: what stands in one line of the file. `refused`: how it failed instead."""

    format: str
    number: int
    model: str
    temperature: float
    calls: tuple[Call, ...] = ()
    refused: str = ""


@dataclass(slots=True)
class FormatCount:
    """Of one format. `finished` calls are `valid`, `checked` or `wrong`; `warned` counts those whose caller was warned."""

    finished: int = 0
    cut: int = 0
    valid: int = 0
    checked: int = 0
    warned: int = 0
    wrong: int = 0


@dataclass(slots=True)
class CallsReport:
    """`tools`: how many were offered; `called`: names of those with a finished call. `wrong`: a sentence each."""

    model: str
    temperature: float
    tools: int
    formats: dict[str, FormatCount] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    requests: set[tuple[str, int]] = field(default_factory=set)
    """Requests that were answered, as (format, number)."""

    def of(self, form: str) -> FormatCount:
        return self.formats.setdefault(form, FormatCount())

    @property
    def finished(self) -> int:
        return sum(count.finished for count in self.formats.values())

    def add(self, batch: Batch) -> None:
        self.requests.add((batch.format, batch.number))
        if batch.refused:
            self.wrong.append(f"{batch.format}: {batch.refused}")
        count = self.of(batch.format)
        for call in batch.calls:
            if call.outcome == "cut":
                count.cut += 1
                continue
            count.finished += 1
            count.warned += call.warned
            self.called.add(call.name)
            setattr(count, call.outcome, getattr(count, call.outcome) + 1)
            if call.outcome == "wrong":
                self.wrong.append(f"{batch.format}: {call.name}: {call.said}: {call.arguments[:200]}")

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "temperature": self.temperature,
            "tools": self.tools,
            "tools_called": len(self.called),
            "formats": {name: asdict(count) for name, count in self.formats.items()},
            "wrong": self.wrong,
        }


class CallsFile:
    """Batches in a file of JSON lines: every answered request is added at once. A last line that was cut is dropped."""

    def __init__(self, path: Path | None, report: CallsReport) -> None:
        """Reads what the file holds into the report. Raises OSError, and ValueError for another model or temperature."""
        self._file: IO[bytes] | None = None
        if path is None:
            return
        for batch in _read(path):
            if (batch.model, batch.temperature) != (report.model, report.temperature):
                raise ValueError(
                    f"{path} holds calls of {batch.model} at temperature {batch.temperature:g}; name another file for others."
                )
            report.add(batch)
        self._file = path.open("ab")

    def add(self, batch: Batch) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(batch) + b"\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _read(path: Path) -> Iterable[Batch]:
    if not path.exists():
        return
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(len(whole) - len(lines.pop()))
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Batch)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}, line {number}, is no record of calls: {error}.") from error


def schemas_of(tools: Iterable[Any]) -> Mapping[str, Any]:
    """Full schemas of tools by name."""
    return {tool.name: tool.parameters or NOTHING for tool in tools}
