"""Mistral's calls behind the control token [TOOL_CALLS]: a list of JSON objects up to 2024, names and arguments since then.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.call_body import CallBody
from grammar.calls.body import CallReader
from grammar.calls.named import NamedCall
from grammar.calls.sections import Section
from grammar.formats import tags
from grammar.formats.common import SectionFormat, signature, to_json
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.tools import Tool

BEGIN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9


class _Mistral(SectionFormat):
    def system_prompt(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return ""
        return f"[AVAILABLE_TOOLS]{to_json([signature(tool) for tool in tools])}[/AVAILABLE_TOOLS]"

    def render_result(self, content: str, *, name: str | None = None, call_id: str | None = None) -> str:
        if call_id is None:
            return f"[TOOL_RESULTS]{content}[/TOOL_RESULTS]"
        return f"[TOOL_RESULTS]{to_json({'content': content, 'call_id': self.history_id(call_id)})}[/TOOL_RESULTS]"

    def new_call_id(self) -> str:
        """Mistral's templates take nine letters and digits only."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))

    def history_id(self, call_id: str) -> str:
        if len(call_id) == _ID_LENGTH and all(char in _ALPHABET for char in call_id):
            return call_id
        digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=_ID_LENGTH).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest)


class MistralJsonFormat(_Mistral):
    """A list of JSON objects. `space`: what stands between the token and the list; templates for SentencePiece write one."""

    name = "mistral_json"
    markers = (BEGIN,)
    section = Section(BEGIN, opening="[", separator=",", closing="]")

    def __init__(
        self,
        limits: GrammarLimits = DEFAULT_LIMITS,
        special_tokens: frozenset[str] = frozenset(),
        *,
        space: str = "",
    ) -> None:
        super().__init__(limits, special_tokens)
        self._space = space

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return to_json({"name": name, "arguments": arguments})

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        if not calls:
            return content
        return f"{content}{BEGIN}{self._space}[{', '.join(self.render_call(name, given) for name, given in calls)}]"

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = [tags.tag(f'{{"name": {to_json(tool.name)}, "arguments": ', schemas.arguments(tool), "}") for tool in tools]
        calls = tags.tags_between(written, separator=", ", most=most)
        return tags.sequence(tags.text(self._space + "["), calls, tags.text("]"))

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return CallBody(index, names, "arguments", call_id)


class MistralFormat(_Mistral):
    """Name and arguments behind tokens of their own, for each call."""

    name = "mistral"
    markers = (BEGIN, ARGS)
    section = Section(BEGIN)

    @property
    def exempt_regions(self) -> tuple[tuple[str, str], ...]:
        return ((BEGIN, "\0"),)  # calls are the end of an answer

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{BEGIN}{name}{ARGS}{to_json(arguments)}"

    def render_calls(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return content + "".join(self.render_call(name, arguments) for name, arguments in calls)

    def calls(self, schemas: tags.Schemas, tools: Sequence[Tool], most: int | None) -> tags.Tag:
        written = [tags.sequence(tags.text(tool.name), self.marker(ARGS), schemas.arguments(tool)) for tool in tools]
        return self.repeated(written, most, between="")

    def reader(self, index: int, tools: Mapping[str, Tool], names: frozenset[str], call_id: Callable[[], str]) -> CallReader:
        return NamedCall(index, names, call_id, separator=ARGS)
