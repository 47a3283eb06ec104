"""A chat template that is run with holes in place of texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.chat_templates import TemplateNamespace, make_environment, to_json
from gateway.outlines.holes import Composite, Hole, Opaque, OpaqueError, Sealed, Trace, holds, is_written, joined, read

# They pass values on, count them or choose some; whoever asks for the text of one is asked by the hole.
_STRUCTURAL = frozenset(
    (
        *("length", "count", "first", "last", "list", "reverse", "default", "d", "items"),
        *("map", "select", "reject", "selectattr", "rejectattr"),
    )
)
# What they say is the same of any text.
_BY_TYPE = frozenset(
    ("none", "defined", "undefined", "boolean", "true", "false", "integer", "float", "number", "callable", "mapping")
)
_METHODS = frozenset(("strip", "lstrip", "rstrip", "startswith", "endswith"))
# What jinja2 passes on to functions that ask for their context, of which there are none.
_SCOPES = frozenset(("_loop_vars", "_block_vars"))
_BY_OPERATOR = frozenset(("eq", "==", "equalto", "ne", "!=", "in"))


class OutlineTemplate:
    """One template. Not safe to use from several threads at once."""

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises OpaqueError for a template that turns what it wrote into values where nobody sees it."""
        self._environment = make_environment(now, _HoleEnvironment)
        self._environment.watch()
        tree = self._environment.parse(source)
        if tree.find(nodes.AssignBlock) is not None or tree.find(nodes.FilterBlock) is not None:
            raise OpaqueError("the template keeps or filters blocks")
        self._template = self._environment.from_string(source)

    def run(self, trace: Trace, variables: Mapping[str, Any]) -> str:
        """What it writes for these variables, with the holes of `trace` in them. Raises whatever the template does, and
        OpaqueError."""
        self._environment.trace = trace
        return self._template.render(variables)


class _HoleGenerator(CodeGenerator):
    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 names it so
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _HoleEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _HoleGenerator
    trace: Trace

    def watch(self) -> None:
        """Everything that could see a text is put between it and the template."""
        self.finalize = _written
        self.filters = {name: _watched_filter(name, filter_) for name, filter_ in self.filters.items()}
        self.filters["tojson"] = self._to_json
        self.tests = {name: _watched_test(name, cast("Callable[..., Any]", test)) for name, test in self.tests.items()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Sealed) and attribute not in _METHODS:
            raise OpaqueError(f"the template asks a text for {attribute!r}")
        return super().getattr(obj, attribute)

    def concatenated(self, values: Sequence[Any]) -> Any:
        """`a ~ b`."""
        if not holds(values):
            return "".join(map(str, values))
        return joined([value if holds(value) else str(value) for value in values])

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(called, "__self__", None)
        given = [value for name, value in kwargs.items() if name not in _SCOPES]
        if holds((args, given)) and not isinstance(called, Macro) and called is not TemplateNamespace:
            raise OpaqueError("a function is called with a text")
        result = super().call(context, called, *args, **kwargs)
        # What a macro wrote may be looked at by its caller; the body of a tag is written and nothing else.
        if isinstance(result, str) and is_written(result) and not isinstance(owner, Extension):
            return read(self.trace, result)
        return result

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> Any:
        write = functools.partial(to_json, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if not holds(value):
            return write(value)
        name = ("tojson", _name(value), ensure_ascii, indent, separators, sort_keys)
        return self.trace.derive(name, lambda values: write(_filled(value, values)))


def _written(value: Any) -> Any:
    return value.written() if isinstance(value, Sealed) else value


def _watched_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if name in _STRUCTURAL or not holds((args, kwargs)):
            return filter_(*args, **kwargs)
        if name == "string" and len(args) == 1 and isinstance(args[0], Hole | Composite):
            return args[0]
        if name == "trim" and isinstance(args[0], Hole) and not kwargs and len(args) <= 2:
            return args[0].strip(*args[1:])
        raise OpaqueError(f"the filter {name!r} reads a text")

    return watched


def _watched_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not holds((args, kwargs)):
            return test(*args, **kwargs)
        value = args[0]
        text = isinstance(value, Hole | Composite)
        if isinstance(value, Sealed) and len(args) == 1:
            if name == "string":
                return text
            if name == "mapping":
                return not text
            if name in ("iterable", "sequence"):
                return True
        if name in _BY_TYPE or name in _BY_OPERATOR:
            return test(*args, **kwargs)
        if not isinstance(value, Sealed) and name in ("string", "iterable", "sequence"):
            return test(*args, **kwargs)  # a message, or a list of them
        raise OpaqueError(f"the test {name!r} reads a text")

    return watched


def _filled(value: Any, values: Sequence[Any]) -> Any:
    """A structure with values in place of its holes."""
    if isinstance(value, Opaque):
        return values[value.number]
    if isinstance(value, Composite):
        return "".join(part if isinstance(part, str) else values[part.number] for part in value.parts)
    if isinstance(value, list | tuple):
        return [_filled(inner, values) for inner in value]
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    return value


def _name(value: Any) -> Hashable:
    """Equal for structures that are filled alike."""
    if isinstance(value, Opaque):
        return ("hole", value.number)
    if isinstance(value, Composite):
        return ("text", *map(_name, value.parts))
    if isinstance(value, list | tuple):
        return ("list", *map(_name, value))
    if isinstance(value, dict):
        return ("dict", *((key, _name(inner)) for key, inner in value.items()))
    return (type(value).__name__, value)
