"""About how long XGrammar 0.2.9 takes to compile a prepared schema, from its shape alone.

The formulas follow measurements with a vocabulary of 49k tokens on a busy server core; they lean to the high side. What grows
fastest: optional properties of one object (cubic), a least or most number of them on top, names told apart from described
ones, counted repetition in patterns, enums of thousands of values, depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from grammar.counted import EXACT_LENGTH
from grammar.pattern import examine_pattern

_PER_NODE = 0.5
_PER_NUMBER_RANGE = 4.0
_PER_COUNTED = 20.0
_PER_EXCLUDED_PREFIX = 15.0
"""Names of further properties must differ from the described ones: an automaton over all their prefixes."""


def estimated_milliseconds(schema: dict[str, Any] | bool) -> float:
    """The cost of a schema as `grammar.schema` returns it, with its definitions, but without `counting_milliseconds`."""
    return sum(_PER_NODE + depth / 10 + _own(node) for node, depth in _nodes(schema))


def counting_milliseconds(schema: dict[str, Any] | bool) -> float:
    """The cost of counting characters (see grammar.counted), which all strings of all schemas of a grammar share."""
    longest = max((max(node.get("minLength", 0), node.get("maxLength", 0)) for node, _ in _nodes(schema)), default=0)
    return _PER_COUNTED * min(longest, EXACT_LENGTH)


def _nodes(schema: dict[str, Any] | bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Every subschema with its depth."""
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node, depth
        for key in ("properties", "patternProperties", "$defs"):
            stack.extend((child, depth + 1) for child in node.get(key, {}).values())
        for key in ("anyOf", "prefixItems"):
            stack.extend((child, depth + 1) for child in node.get(key, ()))
        stack.extend((node[key], depth + 1) for key in ("items", "additionalProperties", "propertyNames") if key in node)


def distinct_prefixes(names: Iterable[str]) -> int:
    """How many nodes a trie of these names has."""
    return len({name[:end] for name in names for end in range(1, len(name) + 1)})


def _trie_states(texts: Sequence[str]) -> int:
    """Characters of these texts without what each begins with like its neighbour in order."""
    ordered = sorted(texts)
    return sum(map(len, ordered)) - sum(_shared(one, other) for one, other in pairwise(ordered))


def _shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _own(node: dict[str, Any]) -> float:
    cost = 0.0
    if "enum" in node or "const" in node:
        values = node.get("enum", [node.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        states = _trie_states(texts) + 8 * (len(values) - len(texts))
        cost += len(values) / 30 + 34 * (len(values) / 1000) ** 2 + states / 100 + 2 * (states / 1000) ** 2
    if "pattern" in node:
        cost += pattern_milliseconds(node["pattern"])
    for pattern in node.get("patternProperties", ()):
        cost += pattern_milliseconds(pattern)
    if "minLength" in node or "maxLength" in node or "format" in node:
        cost += 12.0
    if any(key.endswith("imum") for key in node):
        cost += _PER_NUMBER_RANGE
    if "multipleOf" in node:
        cost += min(float(node["multipleOf"]), 1000.0) / 5
    properties = node.get("properties", {})
    optional = len(properties) - sum(1 for name in node.get("required", ()) if name in properties)
    characters = sum(map(len, properties))
    cost += optional**3 / 60_000 + characters / 50 + (characters / 1000) ** 2 / 4
    if node.get("additionalProperties", False) is not False:
        cost += _PER_EXCLUDED_PREFIX * distinct_prefixes(properties)
    counted = min(max(node.get("minProperties", 0), node.get("maxProperties", 0)), len(properties))
    if counted and optional:
        cost += counted * optional**3 / 800
    return cost


def pattern_milliseconds(pattern: str) -> float:
    """The cost of one pattern. Raises PatternRefused."""
    size = examine_pattern(pattern).size
    return 1.0 + 12.0 * min(size, 128) + size**2 / 1000
