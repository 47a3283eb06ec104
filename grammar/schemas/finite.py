"""Whether a schema has any finite value: a node that requires itself would make the model write for ever."""

from __future__ import annotations

from typing import Any


def can_end(root: dict[str, Any] | bool) -> bool:
    """True when some finite JSON value satisfies a prepared schema (references are "#" and "#/$defs/NAME" only).

    The least fixed point over the definitions, as for the productive symbols of a context-free grammar.
    """
    if isinstance(root, bool):
        return root
    nodes: dict[str, Any] = {"#": root, **{f"#/$defs/{name}": node for name, node in root.get("$defs", {}).items()}}
    ending: set[str] = set()
    while True:
        found = {ref for ref, node in nodes.items() if ref not in ending and _ends(node, ending)}
        if not found:
            return "#" in ending
        ending |= found


def _ends(node: dict[str, Any] | bool, ending: set[str]) -> bool:
    if isinstance(node, bool):
        return node
    if "$ref" in node:
        return node["$ref"] in ending
    for key in ("anyOf", "oneOf"):
        if key in node:
            return any(_ends(branch, ending) for branch in node[key])
    types = node.get("type", ())
    if not isinstance(types, str):  # several types, or none: one without required parts will do
        types = [name for name in types if name not in ("object", "array")]
        if types or "type" not in node:
            return True
        return _object_ends(node, ending) or _array_ends(node, ending)
    if types == "object":
        return _object_ends(node, ending)
    return types != "array" or _array_ends(node, ending)


def _object_ends(node: dict[str, Any], ending: set[str]) -> bool:
    properties = node.get("properties", {})
    return all(_ends(properties.get(name, True), ending) for name in node.get("required", ()))


def _array_ends(node: dict[str, Any], ending: set[str]) -> bool:
    count = node.get("minItems", 0)
    prefix = node.get("prefixItems", [])
    needed = prefix[:count] + ([node.get("items", True)] if count > len(prefix) else [])
    return all(_ends(item, ending) for item in needed)
