"""Text with tool calls between tags, each a JSON object: the streaming parser of Hermes and its relatives."""

from __future__ import annotations

from collections.abc import Callable

from grammar.call_body import CallBody
from grammar.calls.sections import Section, SectionParser


class TaggedCallParser(SectionParser):
    """See `grammar.calls.sections.SectionParser`."""

    def __init__(
        self,
        begin: str,
        end: str,
        names: frozenset[str],
        call_id: Callable[[], str],
        *,
        arguments_key: str = "arguments",
        parallel: bool = True,
        most: int | None = None,
    ) -> None:
        super().__init__(
            Section(begin, after_call=end),
            lambda index: CallBody(index, names, arguments_key, call_id),
            most=most if parallel else 1,
        )
