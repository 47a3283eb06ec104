"""A conversation to the text the model reads.

`ChatRenderer` learns once, by rendering small conversations, what its template can do: whether it shows tools, whether it
knows the developer role, how it wants the arguments of past calls. What a template cannot do is done in its place by the
model's tool-call format: the tools go into the system message, past calls and results into plain text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from gateway.chat_templates import ChatTemplate, TemplateRefusal
from gateway.turn import TurnError
from grammar.formats.base import ToolFormat
from grammar.tools import Tool

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that a request's chat_template_kwargs must not set."""

_PROBE = "zq7probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}},
}
_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template can do, found by trying."""

    shows_tools: bool
    renders_calls: bool
    arguments_as_text: bool
    needs_content: bool
    knows_developer: bool


class ChatRenderer:
    """Renders turns with one model's template(s). Stateless after construction: safe to use from several threads."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], tool_format: ToolFormat, *, model: str
    ) -> None:
        """`templates` by name: `default`, and `tool_use` where a model has a second one for turns with tools.

        Raises ValueError for a template with a syntax error.
        """
        self._model = model
        self._special_tokens = dict(special_tokens)
        told = json.dumps([sorted(templates.items()), sorted(special_tokens.items()), type(tool_format).__name__])
        self.fingerprint = xxhash.xxh3_128_hexdigest(told.encode())
        """Equal for renderers that write the same for the same."""
        self._format = tool_format
        self._templates: dict[str, tuple[ChatTemplate, TemplateTraits]] = {}
        for name, source in templates.items():
            if name not in ("default", "tool_use"):
                continue
            try:
                template = ChatTemplate(source)
            except ValueError as error:
                raise ValueError(f"The chat template {name!r} of {model} is not valid, {error}.") from error
            self._templates[name] = (template, self._probe(template))

    @property
    def has_template(self) -> bool:
        """False for a base model: it takes /v1/completions only."""
        return "default" in self._templates

    def volatile(self) -> list[str]:
        """What a prompt depends on beside the request: the date, as the templates would show it now. Where that cannot be said,
        something that is never twice the same."""
        return [part for template, _ in self._templates.values() for part in template.volatile()]

    def content_words(self) -> frozenset[str]:
        """What the templates look for in the texts of messages."""
        return frozenset().union(*(template.content_words for template, _ in self._templates.values()))

    def traits(self, with_tools: bool = False) -> TemplateTraits:
        """What the template for turns with or without tools can do. Raises KeyError without a template."""
        return self._choose(with_tools)[1]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text for normalised messages (gateway.turn.Turn). Raises TurnError 400 in the template's own words."""
        if not self.has_template:
            raise TurnError(
                400,
                "no_chat_template",
                f"The model '{self._model}' has no chat template, so it takes no messages. Use /v1/completions.",
                param="messages",
            )
        template, traits = self._choose(bool(tools))
        variables = self.variables(tools, template_kwargs=template_kwargs, add_generation_prompt=add_generation_prompt)
        variables["messages"] = self._prepare(messages, tools, traits)
        try:
            return template.render(variables)
        except RecursionError as error:
            raise TurnError(
                400,
                "invalid_request",
                "The tools or the arguments of a past call are nested too deeply to be written as JSON. Flatten them.",
                param="messages",
            ) from error
        except TemplateRefusal as refusal:
            raise TurnError(
                400,
                "chat_template_error",
                f"The chat template of '{self._model}' does not take this conversation: {_sentence(str(refusal))}",
                param="messages",
            ) from refusal

    def variables(
        self, tools: Sequence[Tool], *, template_kwargs: Mapping[str, Any] | None, add_generation_prompt: bool
    ) -> dict[str, Any]:
        """What a template gets beside the messages."""
        return {
            **self._special_tokens,
            "documents": None,
            **(template_kwargs or {}),
            "tools": [tool_dict(tool) for tool in tools] if tools and self.traits(bool(tools)).shows_tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def template(self, with_tools: bool) -> ChatTemplate:
        """The one for turns with or without tools. Raises KeyError without a template."""
        return self._choose(with_tools)[0]

    def prepared(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, with_tools: bool) -> list[Any]:
        """Messages as the template for turns with or without tools gets them. Of a conversation that begins with other
        messages, and goes on with these, it gets those and these, if `tools` are none here, and not both results of calls
        end there and begin here."""
        return self._prepare(messages, tools, self.traits(with_tools))

    def _choose(self, with_tools: bool) -> tuple[ChatTemplate, TemplateTraits]:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    def _prepare(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], traits: TemplateTraits) -> list[Any]:
        prepared = [self._message(message, traits) for message in messages]
        if not traits.renders_calls:
            prepared = list(self._calls_as_text(prepared))
        if tools and not traits.shows_tools:
            prompt = self._format.system_prompt(tools)
            if prepared and prepared[0]["role"] == "system":
                first = prepared[0]
                text = first.get("content") or ""
                prepared[0] = {**first, "content": f"{text}\n\n{prompt}" if text else prompt}
            else:
                prepared.insert(0, {"role": "system", "content": prompt})
        return prepared

    def _message(self, message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
        """A copy as this template wants it. Reasoning goes under every name templates read it by, as in transformers."""
        copy = {key: value for key, value in message.items() if value is not None}
        if copy["role"] == "developer" and not traits.knows_developer:
            copy["role"] = "system"
        reasoning = copy.get("reasoning_content")
        if reasoning is not None:
            copy.setdefault("thinking", reasoning)
        if isinstance(copy.get("tool_call_id"), str):
            copy["tool_call_id"] = self._format.history_id(copy["tool_call_id"])
        calls = copy.get("tool_calls")
        if calls:
            calls = copy["tool_calls"] = [_with_id(call, self._format.history_id) for call in calls]
        if calls and traits.renders_calls and traits.arguments_as_text:
            copy["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if traits.needs_content:
            copy.setdefault("content", "")
        return copy

    def _calls_as_text(self, messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Past calls and results in the model's own call format; the results of parallel calls become one user message."""
        results: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                results.append(
                    self._format.render_result(
                        message.get("content") or "", name=message.get("name"), call_id=message.get("tool_call_id")
                    )
                )
                continue
            if results:
                yield {"role": "user", "content": "\n".join(results)}
                results = []
            calls = message.get("tool_calls")
            if calls:
                pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                text = self._format.render_calls(message.get("content") or "", pairs)
                message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
            yield message
        if results:
            yield {"role": "user", "content": "\n".join(results)}

    def _probe(self, template: ChatTemplate) -> TemplateTraits:
        def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
            try:
                return template.render(
                    {
                        **self._special_tokens,
                        "documents": None,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": True,
                    }
                )
            except TemplateRefusal:
                return None

        def with_call(arguments: object, content: str | None) -> str | None:
            call = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
            message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
            if content is not None:
                message["content"] = content
            result = {"role": "tool", "tool_call_id": "abcdefghi", "name": _PROBE, "content": "b"}
            return rendered([_USER, message, result], [_PROBE_TOOL])

        shown = rendered([_USER], [_PROBE_TOOL])
        shows_tools = shown is not None and _PROBE in shown
        arguments = {_PROBE + "k": _PROBE + "v"}
        quoted = f'"{_PROBE}k"'
        written = self._format.render_call(_PROBE, arguments).strip()
        # Compact JSON text, JSON text printed raw, and a dict printed by tojson all show the quoted key; a dict printed raw
        # shows Python's own quotes, and a JSON text passed through tojson shows escaped ones. Formats without quotes around
        # keys are recognised by the whole call.
        for content in (None, ""):
            for as_text in (False, True):
                text = with_call(json.dumps(arguments) if as_text else arguments, content)
                if text is not None and (written in text or quoted in text):
                    return TemplateTraits(shows_tools, True, as_text, content is not None, "developer" in template.source)
        plain = rendered([_USER, {"role": "assistant"}, _USER])
        return TemplateTraits(shows_tools, False, False, plain is None, "developer" in template.source)


def tool_dict(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it. Keys always come in the same order, so that the same tools give the same text."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    # Templates read into the schema without looking whether there is one.
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _with_id(call: Mapping[str, Any], history_id: Callable[[str], str]) -> Mapping[str, Any]:
    call_id = call.get("id")
    known = history_id(call_id) if isinstance(call_id, str) else call_id
    return call if known == call_id else {**call, "id": known}


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _sentence(text: str) -> str:
    text = " ".join(text.split())[:300]
    return text if text.endswith((".", "!", "?")) else text + "."
