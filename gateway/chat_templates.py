"""Chat templates in a sandbox, with the environment transformers gives them: the same filters, globals and extensions, so
that a template renders to the same text (tests compare them character by character)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

E = TypeVar("E", bound=ImmutableSandboxedEnvironment)

_DATE_CALL = re.compile(r"strftime_now\s*\(")
_DATE = re.compile(r"""strftime_now\s*\(\s*["']([^"'\\]*)["']\s*\)""")
_RANDOM = re.compile(r"lipsum|\|\s*random")


class TemplateRefusal(Exception):  # noqa: N818 - it is an answer to the caller
    """The template raised: it does not take this conversation. The message is the template's own."""


class _Generation(Extension):
    """`{% generation %}` marks what training should learn; for rendering it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` without the attributes of the type, through which a template could reach interpreter internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """`namespace(...)` that takes no underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes: dict[Any, Any] = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}.")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment(now: Callable[[], datetime], kind: type[E]) -> E:
    """What chat templates expect. `now` is what strftime_now shows."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = TemplateNamespace
    return environment


def _content_words(tree: nodes.Template) -> frozenset[str]:
    """What the template looks for in texts, as far as it is written out: constants compared or given to a call, without
    plain words, which are roles and names of fields."""
    found: set[str] = set()
    for parent in tree.find_all((nodes.Compare, nodes.Call)):
        for constant in parent.find_all(nodes.Const):
            value = constant.value
            if isinstance(value, str) and 3 <= len(value) <= 64 and not value.replace("_", "").isalnum():
                found.add(value)
    return frozenset(found)


class ChatTemplate:
    """One compiled template. Safe to render from several threads."""

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises ValueError with the line when `source` is no valid template. `now` is what strftime_now shows."""
        self.source = source
        self._now = now
        self._formats = _DATE.findall(source)
        # A date whose format is not written out, or a template that draws lots.
        self._unforeseeable = len(_DATE_CALL.findall(source)) != len(self._formats) or bool(_RANDOM.search(source))
        try:
            environment = make_environment(now, ImmutableSandboxedEnvironment)
            self._template = environment.from_string(source)
            self.content_words = _content_words(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error

    def volatile(self) -> list[str]:
        """The dates that the template may show, as of now; something new each time when it may show anything."""
        if self._unforeseeable:
            return [secrets.token_hex(8)]
        return [self._now().strftime(form) for form in self._formats]

    @property
    def is_foreseeable(self) -> bool:
        """Whether it shows nothing but what it is given and `volatile`."""
        return not self._unforeseeable

    @property
    def clock(self) -> Callable[[], datetime]:
        """What strftime_now shows."""
        return self._now

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables (messages, tools, documents, add_generation_prompt, special tokens and more).

        Raises TemplateRefusal when the template raises, or cannot cope with what it is given.
        """
        try:
            return self._template.render(variables)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        except RecursionError as error:
            raise TemplateRefusal("the conversation is nested too deeply for the template") from error
