"""Outlines of one model's templates: made when a kind of turn is first seen, and filled for the turns after it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.outlines.holes import OpaqueError, Step, Trace, Values, segments
from gateway.outlines.shapes import Shape, UnfitError, all_apart, plain_apart, put_together
from gateway.outlines.template import OutlineTemplate
from gateway.rendering import ChatRenderer
from grammar.tools import Tool

log = logging.getLogger(__name__)

_MAX_FAMILIES = 512
_MAX_OUTLINES = 8
_MAX_TRIES = 32
_FAILURE = 4
"""Tries that one without an outcome counts for: it may be for what a single text says, or for all of them."""


class Head(NamedTuple):
    """Messages behind which others are rendered, taken apart. `answered`: the last one is the result of a call."""

    shapes: tuple[Shape, ...]
    values: Values
    answered: bool


class Wanted(NamedTuple):
    """What new messages add to the text. `key`: all but the `values`, that is the texts in the messages; `head`: how many of
    the messages, whose `shapes` these are, are not new."""

    key: Hashable
    values: Values
    shapes: tuple[Shape, ...]
    head: int
    prompt: bool


class Outline:
    """Fixed text and places of values, with the answers that values must give for it to be right."""

    __slots__ = ("_answers", "_segments", "_steps")

    def __init__(self, trace: Trace, text: str) -> None:
        self._segments = segments(text)
        self._steps: tuple[Step, ...] = tuple(trace.steps)
        self._answers: tuple[tuple[Step, Any], ...] = tuple(trace.answers)

    def fill(self, given: Values) -> str | None:
        """The text for these values; None where the template might write something else."""
        values = [*given]
        try:
            for step in self._steps:
                values.append(step(values))
            for question, answer in self._answers:
                if question(values) != answer:
                    return None
        except (TypeError, ValueError, RecursionError):
            return None  # values that JSON has no text for
        return "".join([values[part] if isinstance(part, int) else part for part in self._segments])


class _Family:
    """Outlines of one key."""

    __slots__ = ("outlines", "tries")

    def __init__(self) -> None:
        self.outlines: tuple[Outline, ...] = ()
        self.tries = 0


class Outlines:
    """Of one model's templates. Safe to use from several threads."""

    def __init__(self, renderer: ChatRenderer, stand_in: Tool) -> None:
        """`stand_in`: in place of the tools of a turn."""
        self._renderer = renderer
        self._stand_in = stand_in
        self._templates: dict[bool, OutlineTemplate | None] = {}
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Reads the templates, which takes some 10 ms each."""
        with self._lock:
            for with_tools in (False, True):
                self._template(with_tools)

    def head(self, messages: Sequence[Mapping[str, Any]], with_tools: bool) -> Head | None:
        """None for messages, or a template, of which there can be no outlines."""
        if not self._renderer.has_template or not self._renderer.template(with_tools).is_foreseeable:
            return None
        values: Values = []
        shapes = self._apart(messages, (self._stand_in,) if with_tools else (), with_tools, values)
        return None if shapes is None else Head(shapes, values, messages[-1]["role"] == "tool")

    def wanted(
        self, head: Head, messages: Sequence[Mapping[str, Any]], with_tools: bool, scope: Hashable, *, prompt: bool
    ) -> Wanted | None:
        """What is looked for: what `messages` add behind `head`, with the generation prompt after them if `prompt`. `scope`
        stands for the template variables, and all else that the text depends on."""
        values = head.values[:]
        added = self._apart(messages, (), with_tools, values)
        if added is None or (head.answered and messages[0]["role"] == "tool"):
            return None
        shapes = (*head.shapes, *added)
        return Wanted((scope, with_tools, prompt, len(head.shapes), shapes), values, shapes, len(head.shapes), prompt)

    def find(self, wanted: Wanted) -> str | None:
        """The text, None where no outline is known that is right for it."""
        family = self._families.get(wanted.key)
        if family is not None:
            for outline in family.outlines:
                text = outline.fill(wanted.values)
                if text is not None:
                    return text
        return None

    def learn(self, wanted: Wanted, with_tools: bool, kwargs: Mapping[str, Any], text: str) -> None:
        """Looks for an outline of what `find` does not know; `text` is what the template writes."""
        with self._lock:
            family = self._families.get(wanted.key)
            if family is None:
                family = self._families[wanted.key] = _Family()
                if len(self._families) > _MAX_FAMILIES:
                    self._families.popitem(last=False)
            if family.tries >= _MAX_TRIES:
                return
            outline = self._made(wanted, with_tools, kwargs)
            if outline is None or self._stand_in.name in text or outline.fill(wanted.values) != text:
                family.tries += _FAILURE
            else:
                family.tries += 1
                family.outlines = (outline, *family.outlines[: _MAX_OUTLINES - 1])

    def _made(self, wanted: Wanted, with_tools: bool, kwargs: Mapping[str, Any]) -> Outline | None:
        template = self._template(with_tools)
        if template is None:
            return None
        trace = Trace(wanted.values)
        numbers = iter(range(len(wanted.values)))
        messages = [put_together(shape, trace, numbers) for shape in wanted.shapes]
        tools = (self._stand_in,) if with_tools else ()

        def run(count: int, prompt: bool) -> str:
            variables = self._renderer.variables(tools, template_kwargs=kwargs, add_generation_prompt=prompt)
            return template.run(trace, {**variables, "messages": messages[:count]})

        try:
            before = run(wanted.head, prompt=False)
            after = run(len(messages), prompt=wanted.prompt)
        except Exception as error:  # noqa: BLE001 - templates raise what they like; this one is rendered as it is
            log.debug("no outline: %s", error)
            return None
        return Outline(trace, after[len(before) :]) if after.startswith(before) else None

    def _template(self, with_tools: bool) -> OutlineTemplate | None:
        if with_tools not in self._templates:
            template = self._renderer.template(with_tools)
            try:
                self._templates[with_tools] = OutlineTemplate(template.source, now=template.clock)
            except OpaqueError as error:
                log.debug("no outlines: %s", error)
                self._templates[with_tools] = None
        return self._templates[with_tools]

    def _apart(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], with_tools: bool, values: Values
    ) -> tuple[Shape, ...] | None:
        plain = None if tools and not self._renderer.traits(with_tools).shows_tools else plain_apart(messages, values)
        if plain is not None:
            return plain
        try:
            return all_apart(self._renderer.prepared(messages, tools, with_tools=with_tools), values)
        except UnfitError:
            return None
