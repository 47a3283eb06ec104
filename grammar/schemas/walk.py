"""The walk that prepares a schema: combinators and references here, the other keywords in `keywords`."""

from __future__ import annotations

from typing import Any

import msgspec

from grammar.schemas import keywords
from grammar.schemas.context import Context, Path, kind_of
from grammar.schemas.cost import counting_milliseconds, estimated_milliseconds
from grammar.schemas.exclusive import exclusive
from grammar.schemas.finite import can_end
from grammar.schemas.merge import Schema, merge
from grammar.schemas.references import References, constraints_beside
from grammar.schemas.unenforced import UNENFORCED

_COMBINATORS = ("anyOf", "oneOf")
_SHOWN_LEVELS = 8
"""How far the pointer of a schema that is too deep leads into it."""


def prepare(root: Schema, context: Context, *, as_object: bool) -> Schema:
    """The prepared form of a whole schema. `as_object`: only objects are wanted, whatever the root says."""
    measure(root, context)
    return _Walk(root, context).run(as_object)


def measure(root: Schema, context: Context) -> None:
    """Refuses what is too deep or too large to be walked. Takes no recursion, so depth cannot hurt it."""
    most = context.limits.max_schema_depth
    level: list[tuple[Path, Any]] = [((), root)]
    for _ in range(3 * most + 8):
        children: list[tuple[Path, Any]] = []
        for path, value in level:
            pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            children.extend(
                ((*path, key) if len(path) < _SHOWN_LEVELS else path, child)
                for key, child in pairs
                if isinstance(child, dict | list)
            )
        level = children
        if not level:
            break
    else:
        context.refuse(f"nests too deeply; at most {most} levels of schemas are allowed", level[0][0])
    try:
        size = len(msgspec.json.encode(root))
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        context.refuse(f"is not valid JSON ({error})", ())
    if size > context.limits.max_schema_bytes:
        context.refuse(f"takes {size} bytes; at most {context.limits.max_schema_bytes} are allowed", ())


class _Walk:
    def __init__(self, root: Schema, context: Context) -> None:
        self._root = root
        self._context = context
        self._references = References(root, context)

    def run(self, as_object: bool) -> Schema:
        root = self._root
        if as_object and isinstance(root, dict):
            root = self._as_object(root)
        prepared = self._visit(root, (), 0)
        definitions: dict[str, Schema] = {}
        while pending := self._references.take_pending():
            for definition in pending:
                written = self._visit(definition.schema, definition.where, definition.depth)
                if written is False:
                    self._context.refuse("allows no value at all", definition.where)
                definitions[definition.name] = written
        if isinstance(prepared, bool):
            return prepared
        if definitions:
            prepared = {**prepared, "$defs": definitions}
        if not can_end(prepared):
            self._context.refuse("requires itself without end, so no finite value fits", ())
        if estimated_milliseconds(prepared) + counting_milliseconds(prepared) > self._context.limits.max_compile_milliseconds:
            what = "would take too long to compile; send fewer optional properties, enum values or pattern repetitions"
            self._context.refuse(what, (), costly=True)
        return prepared

    def _as_object(self, root: dict[str, Any]) -> Schema:
        types = keywords.types_of(root, self._context, ()) if "type" in root else ["object"]
        if "object" not in types:
            self._context.refuse(f"describes {' or '.join(types)}, but the arguments of a tool are an object", ("type",))
        return {**root, "type": "object"}

    def _visit(self, schema: Any, path: Path, depth: int) -> Schema:
        if depth > self._context.limits.max_schema_depth:
            most = self._context.limits.max_schema_depth
            self._context.refuse(f"nests too deeply; at most {most} levels of schemas are allowed", path)
        self._context.count_node(path)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._context.refuse(f"has {kind_of(schema)} where a schema (an object or a boolean) belongs", path)
        schema = self._without_what_is_not_held(schema, path)
        combined, inlined = self._combined(schema, path, frozenset(), 0)
        if isinstance(combined, bool):
            return combined
        if inlined and "$ref" not in combined:
            return {"$ref": self._references.shared(combined, path, depth + 1)}

        def visit(child: Any, where: Path) -> Schema:
            return self._visit(child, where, depth + 1)

        if "$ref" in combined:
            target, where = self._references.resolve(combined["$ref"], path)
            return target if isinstance(target, bool) else {"$ref": self._references.named(target, where)}
        for key in _COMBINATORS:
            if key in combined:
                if key == "oneOf" and not exclusive(combined[key]):
                    self._context.relax("oneOf", path)
                branches = [visit(branch, (*path, key, i)) for i, branch in enumerate(combined[key])]
                return _alternatives(branches)
        return self._plain(combined, path, visit)

    def _plain(self, schema: dict[str, Any], path: Path, visit: keywords.Visit) -> Schema:
        types = keywords.types_of(schema, self._context, path)
        fixed = keywords.values(schema, types, self._context, path)
        if fixed is not None:
            return fixed
        out: dict[str, Any] = {}
        if types:
            out["type"] = types[0] if len(types) == 1 else types
        if "string" in types:
            out.update(keywords.string(schema, self._context, path))
        if "integer" in types or "number" in types:
            out.update(keywords.number(schema, types, self._context, path))
        if "array" in types:
            out.update(keywords.array(schema, visit, self._context, path))
        if "object" in types:
            described = keywords.object_(schema, visit, self._context, path)
            if not isinstance(described, bool):
                out.update(described)
            elif len(types) == 1:
                return False
            else:
                out["type"] = [name for name in types if name != "object"]
        return out

    def _combined(
        self, schema: dict[str, Any], path: Path, inlined: frozenset[Path], rounds: int
    ) -> tuple[Schema, frozenset[Path]]:
        """The schema with allOf, and whatever stands beside $ref, anyOf or oneOf, merged into one place.

        `inlined`: where the targets lie whose references were merged into this place already. `rounds`: how often this has
        been called and has gone round for this place.
        """
        current: Schema = _without_nullable(schema)
        while True:
            rounds += 1
            if rounds > self._context.limits.max_schema_depth:
                self._context.refuse("combines schemas too often to be followed", path)
            if isinstance(current, bool):
                return current, inlined
            if "$ref" in current:
                beside = constraints_beside(current, "$ref")
                if not beside:
                    return current, inlined
                target, where = self._references.resolve(current["$ref"], path)
                if where in inlined:
                    self._context.refuse(f"has a circular $ref: {current['$ref']!r} leads back to itself", path)
                inlined = inlined | {where}
                current = self._merged(target, beside, path)
            elif "allOf" in current:
                branches = self._branches(current, "allOf", path)
                current = {key: value for key, value in current.items() if key != "allOf"}
                for i, branch in enumerate(branches):
                    self._context.count_node((*path, "allOf", i))
                    resolved, inlined = self._inlined(branch, (*path, "allOf", i), inlined, rounds)
                    current = self._merged(current, resolved, path)
                    self._check_width(current, path)
            else:
                return self._distributed(current, path, inlined, rounds)

    def _inlined(self, branch: Any, path: Path, inlined: frozenset[Path], rounds: int) -> tuple[Schema, frozenset[Path]]:
        """A branch without a $ref or allOf of its own, to be merged with its siblings."""
        if isinstance(branch, dict) and "$ref" in branch:
            target, where = self._references.resolve(branch["$ref"], path)
            if where in inlined:
                return True, inlined  # it is being merged right here: it adds nothing
            inlined = inlined | {where}
            branch, path = self._merged(target, constraints_beside(branch, "$ref"), path), where
        if isinstance(branch, dict) and ("allOf" in branch or "$ref" in branch):
            return self._combined(branch, path, inlined, rounds)
        if not isinstance(branch, dict | bool):
            self._context.refuse(f"has {kind_of(branch)} where a schema (an object or a boolean) belongs", path)
        return branch, inlined

    def _without_what_is_not_held(self, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        """Without the keywords that no grammar holds, and those that are dropped for what they would cost."""
        gone = [key for key in schema if key in UNENFORCED or key in self._context.dropped]
        for key in gone:
            self._context.relax(key, path)
        return {key: value for key, value in schema.items() if key not in gone} if gone else schema

    def _merged(self, first: Schema, second: Schema, path: Path) -> Schema:
        """Both at once; keywords of which only one can be held are noted."""
        if isinstance(first, dict):
            first = self._without_what_is_not_held(first, path)
        if isinstance(second, dict):
            second = self._without_what_is_not_held(second, path)
        return merge(first, second, lambda keyword: self._context.relax(keyword, path))

    def _check_width(self, merged: Schema, path: Path) -> None:
        """Keeps a merge of thousands of branches from taking a time that is quadratic in them."""
        most = self._context.limits.max_properties
        for key in ("properties", "required"):
            value = merged.get(key) if isinstance(merged, dict) else None
            if isinstance(value, dict | list) and len(value) > most:
                self._context.refuse(f"combines more than {most} properties", (*path, "allOf"))

    def _distributed(
        self, schema: dict[str, Any], path: Path, inlined: frozenset[Path], rounds: int
    ) -> tuple[Schema, frozenset[Path]]:
        for key in _COMBINATORS:
            if key not in schema:
                continue
            branches = self._branches(schema, key, path)
            beside = constraints_beside(schema, key)
            if not beside:
                return {key: branches}, inlined
            merged: list[Schema] = []
            everything = inlined
            for i, branch in enumerate(branches):
                self._context.count_node((*path, key, i))
                resolved, here = self._inlined(branch, (*path, key, i), inlined, rounds)
                everything = everything | here
                merged.append(self._merged(beside, resolved, path))
            if key == "oneOf" and not exclusive(branches):
                # Merged branches come out as anyOf, wherever they go from here.
                self._context.relax("oneOf", path)
            return {key: merged}, everything
        return schema, inlined

    def _branches(self, schema: dict[str, Any], key: str, path: Path) -> list[Any]:
        branches = schema[key]
        if not isinstance(branches, list) or not branches:
            what = "an empty list" if branches == [] else kind_of(branches)
            self._context.refuse(f"has {what} in {key} instead of a list of schemas", (*path, key))
        return branches


def _alternatives(branches: list[Schema]) -> Schema:
    """oneOf comes out as anyOf, which is what XGrammar makes of it."""
    possible = [branch for branch in branches if branch is not False]
    if not possible:
        return False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _without_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0's `nullable` as JSON Schema says it."""
    if "nullable" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "nullable"}
    if schema["nullable"] is not True:
        return rest
    if "type" not in rest or any(key in rest for key in ("$ref", "anyOf", "oneOf", "allOf", "const")):
        return {"anyOf": [rest, {"type": "null"}]} if len(rest) > 0 else {}
    types = rest["type"] if isinstance(rest["type"], list) else [rest["type"]]
    rest["type"] = types if "null" in types else [*types, "null"]
    if isinstance(rest.get("enum"), list) and rest["enum"] and None not in rest["enum"]:
        rest["enum"] = [*rest["enum"], None]
    return rest
