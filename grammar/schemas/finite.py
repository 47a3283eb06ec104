"""Whether a schema has any finite value: a node that requires itself would make the model write for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def can_end(root: dict[str, Any] | bool) -> bool:
    """True when some finite JSON value satisfies a prepared schema (references are "#" and "#/$defs/NAME" only).

    The least fixed point over all nodes, as for the productive symbols of a context-free grammar, by counting what every
    node still waits for (Dowling and Gallier 1984): linear in the schema.
    """
    if isinstance(root, bool):
        return root
    graph = _Graph()
    graph.add_root("#", root)
    for name, node in root.get("$defs", {}).items():
        graph.add_root(f"#/$defs/{name}", node)
    return graph.ends("#")


class _Graph:
    """Nodes are numbers. `_missing`: how many more children have to end before the node does."""

    def __init__(self) -> None:
        self._missing: list[int] = []
        self._waiting: list[list[int]] = []
        self._roots: dict[str, int] = {}
        self._todo: list[tuple[int, Any]] = []

    def ends(self, root: str) -> bool:
        while self._todo:
            self._expand(*self._todo.pop())
        ended = [node for node, missing in enumerate(self._missing) if missing == 0]
        while ended:
            for parent in self._waiting[ended.pop()]:
                self._missing[parent] -= 1
                if self._missing[parent] == 0:
                    ended.append(parent)
        return self._missing[self._roots[root]] <= 0

    def add_root(self, ref: str, schema: Any) -> None:
        node = self._root(ref)
        self._todo.append((node, schema))

    def _root(self, ref: str) -> int:
        if ref not in self._roots:
            self._roots[ref] = self._new(1)
        return self._roots[ref]

    def _new(self, missing: int) -> int:
        self._missing.append(missing)
        self._waiting.append([])
        return len(self._missing) - 1

    def _schema(self, schema: Any, parent: int) -> None:
        """A child of `parent`, to be expanded later."""
        child = self._new(1)
        self._waiting[child].append(parent)
        self._todo.append((child, schema))

    def _expand(self, node: int, schema: Any) -> None:
        if isinstance(schema, bool):
            self._missing[node] = 0 if schema else 1  # nothing ever counts a false one down
            return
        if "$ref" in schema:
            self._waiting[self._root(schema["$ref"])].append(node)
            return
        for key in ("anyOf", "oneOf"):
            if key in schema:
                for branch in schema[key]:
                    self._schema(branch, node)
                return
        types = schema.get("type", ())
        names = [types] if isinstance(types, str) else list(types)
        if any(name not in ("object", "array") for name in names) or not names:
            self._missing[node] = 0
            return
        for name in names:
            self._all(_needed_properties(schema) if name == "object" else _needed_items(schema), node)

    def _all(self, schemas: Sequence[Any], parent: int) -> None:
        """A child of `parent` that ends when all of these do."""
        child = self._new(len(schemas))
        self._waiting[child].append(parent)
        for schema in schemas:
            self._schema(schema, child)


def _needed_properties(node: dict[str, Any]) -> list[Any]:
    properties = node.get("properties", {})
    return [properties.get(name, True) for name in node.get("required", ())]


def _needed_items(node: dict[str, Any]) -> list[Any]:
    count = node.get("minItems", 0)
    prefix = node.get("prefixItems", [])
    return [*prefix[:count], *([node.get("items", True)] if count > len(prefix) else [])]
