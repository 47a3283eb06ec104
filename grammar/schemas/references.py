"""Local references of a schema, resolved; every other kind refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import msgspec

from grammar.schemas.context import Context, Path, json_pointer
from grammar.schemas.merge import ANNOTATIONS, Schema


@dataclass(frozen=True, slots=True)
class Pending:
    """A definition to be written: its name under $defs, its schema, where that lies, and how deep it counts as."""

    name: str
    schema: Schema
    where: Path
    depth: int


class References:
    """Gives every referenced subschema a name under the result's $defs, in the order met, and remembers what is to do."""

    def __init__(self, root: Schema, context: Context) -> None:
        self._root = root
        self._context = context
        self._names: dict[str, str] = {}
        self._pending: list[Pending] = []
        self._resolved: dict[str, tuple[Schema, Path]] = {}

    def resolve(self, ref: object, path: Path) -> tuple[Schema, Path]:
        """The schema a reference means, through chains of references that say nothing else, and where it lies."""
        seen: set[str] = set()
        while True:
            if not isinstance(ref, str):
                self._context.refuse("has a $ref that is not a string", path)
            if ref in self._resolved:
                break
            if ref in seen:
                self._context.refuse(f"has a circular $ref: {ref!r} leads back to itself", path)
            seen.add(ref)
            target, where = self._locate(ref, path)
            if not isinstance(target, dict) or "$ref" not in target or constraints_beside(target, "$ref"):
                self._resolved[ref] = target, where
                break
            ref = target["$ref"]
        resolved = self._resolved[ref]
        self._resolved.update(dict.fromkeys(seen, resolved))
        return resolved

    def named(self, target: Schema, where: Path) -> str:
        """A reference in the result to this subschema, which `take_pending` will hand out once."""
        return self._name(json_pointer(where), Pending("", target, where, 0))

    def shared(self, schema: dict[str, Any], where: Path, depth: int) -> str:
        """A reference in the result to a schema that was put together, one for all places where the same comes out.

        That is what ends a recursion through merged references. Where every turn of it makes a larger schema, `depth` ends it.
        """
        return self._name(msgspec.json.encode(schema).decode(), Pending("", schema, where, depth))

    def _name(self, key: str, what: Pending) -> str:
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._pending.append(replace(what, name=self._names[key]))
        return f"#/$defs/{self._names[key]}"

    def take_pending(self) -> list[Pending]:
        """The definitions that are still to be written."""
        pending, self._pending = self._pending, []
        return pending

    def _locate(self, ref: str, path: Path) -> tuple[Schema, Path]:
        refuse = self._context.refuse
        if not ref.startswith("#"):
            refuse(f"has a remote $ref {ref!r}, which is never fetched; put the definition under $defs", path)
        if ref != "#" and not ref.startswith("#/"):
            refuse(f"has a $ref {ref!r} to an anchor; use a JSON pointer such as '#/$defs/name'", path)
        here: Any = self._root
        where: list[str | int] = []
        for part in unquote(ref[2:]).split("/") if len(ref) > 1 else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
                where.append(key)
            elif isinstance(here, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(here):
                here = here[int(key[:9])]
                where.append(int(key[:9]))
            else:
                refuse(f"has a $ref {ref!r} that points nowhere", path)
        if not isinstance(here, dict | bool):
            refuse(f"has a $ref {ref!r} to something that is no schema", path)
        return here, tuple(where)


def constraints_beside(schema: dict[str, Any], *keywords: str) -> dict[str, Any]:
    """What else the schema demands beside these keywords."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS and key not in keywords}
