"""The JSON-Schema-Test-Suite against grammars: which keywords are enforced, which only checked, which refused.

https://github.com/json-schema-org/JSON-Schema-Test-Suite: one file a keyword, each with schemas and instances that are valid or
not. Where a schema counts as enforced, its grammar must not accept any invalid instance. That it does not accept some valid
ones is no fault: an object is closed unless the schema says otherwise, JSON has one spelling, properties have one order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from grammar.compiler import GrammarCompiler
from grammar.schema import prepare_schema
from grammar.tools import GrammarRefused

_ORDERS = 24
"""Orders of an instance's properties that are tried: in the suite few objects have more than four."""


@dataclass(slots=True)
class KeywordRow:
    """One file of the suite. `schemas` that were `enforced` + `checked` + `refused`. `leaks`: invalid instances that the
    grammar of an enforced schema accepts. `narrow`: valid ones that it does not."""

    keyword: str
    enforced: int = 0
    checked: int = 0
    refused: int = 0
    invalid: int = 0
    leaks: list[str] = field(default_factory=list)
    valid: int = 0
    narrow: int = 0
    relaxed: dict[str, int] = field(default_factory=dict)

    @property
    def schemas(self) -> int:
        return self.enforced + self.checked + self.refused


def run_suite(directory: Path, compiler: GrammarCompiler) -> Iterator[KeywordRow]:
    """A row for each file of one draft, in the order of their names. Raises OSError and ValueError for what is no suite."""
    files = sorted(directory.glob("*.json"))
    if not files:
        raise ValueError(f"{directory} holds no JSON files; give a draft's folder of the JSON-Schema-Test-Suite.")
    for path in files:
        row = KeywordRow(path.stem)
        for group in json.loads(path.read_bytes()):
            _group(group, row, compiler)
        yield row


def _group(group: dict[str, Any], row: KeywordRow, compiler: GrammarCompiler) -> None:
    relaxed: dict[tuple[str, str], None] = {}
    try:
        prepared = prepare_schema(group["schema"], relaxed=relaxed)
        source = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": prepared}}
        compiled = compiler.compile(json.dumps(source))
    except GrammarRefused:
        row.refused += 1
        return
    if relaxed:
        row.checked += 1
        for keyword in {keyword for keyword, _ in relaxed}:
            row.relaxed[keyword] = row.relaxed.get(keyword, 0) + 1
        return
    row.enforced += 1
    for test in group["tests"]:
        accepted = any(_accepts(compiled, text) for text in _spellings(test["data"]))
        if test["valid"]:
            row.valid += 1
            row.narrow += not accepted
        else:
            row.invalid += 1
            if accepted:
                row.leaks.append(f"{group['description']}: {test['description']}")


def _accepts(compiled: Any, text: str) -> bool:
    return bool(compiled.matcher().accepts_whole(text))


def _spellings(value: Any) -> Iterator[str]:
    """JSON texts of a value, with its outer properties in different orders."""
    if isinstance(value, dict):
        for order in islice(permutations(value.items()), _ORDERS):
            yield json.dumps(dict(order), ensure_ascii=False)
    else:
        yield json.dumps(value, ensure_ascii=False)
