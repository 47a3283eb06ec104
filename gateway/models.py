"""The models a gateway speaks for: what turns messages into token ids and back, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.config import ModelConfig
from gateway.rendering import ChatRenderer
from gateway.thinking import BudgetFor, ThinkingReader
from gateway.tokenization import ModelFilesError, TextTokenizer
from gateway.turn import TurnError
from grammar.formats.base import ToolFormat
from grammar.formats.registry import format_for, format_named
from grammar.thinking import Thinking, thinking_tags


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model and everything the gateway needs to speak for it."""

    name: str
    tokenizer: TextTokenizer
    renderer: ChatRenderer
    tool_format: ToolFormat
    aliases: tuple[str, ...] = ()
    thinking_reader: ThinkingReader | None = None

    @classmethod
    def load(cls, config: ModelConfig) -> ServedModel:
        """Reads tokenizer and template of a model directory. Raises ModelFilesError."""
        tokenizer = TextTokenizer.load(config.directory)
        templates = tokenizer.files.chat_templates
        template = templates.get("tool_use", templates.get("default"))
        added = tokenizer.backend.get_added_tokens_decoder().values()
        special_tokens = frozenset(token.content for token in added if token.special)
        try:
            if config.tool_format is None:
                tool_format = format_for(template, special_tokens=special_tokens)
            else:
                tool_format = format_named(config.tool_format, special_tokens=special_tokens)
        except KeyError as error:
            raise ModelFilesError(str(error.args[0])) from error
        try:
            renderer = ChatRenderer(templates, tokenizer.files.special_tokens, tool_format, model=config.name)
        except ValueError as error:
            raise ModelFilesError(str(error)) from error
        reader = ThinkingReader(
            renderer,
            thinking_tags(template, special_tokens),
            takes_effort="reasoning_effort" in (template or ""),
            channels=tool_format.owns_reasoning,
        )
        return cls(config.name, tokenizer, renderer, tool_format, config.aliases, reader)

    def thinking(
        self, messages: Sequence[Mapping[str, Any]], with_tools: bool, kwargs: Mapping[str, Any], budget_for: BudgetFor
    ) -> Thinking | None:
        """The reasoning that an answer to these messages begins with, or may; None for none."""
        return None if self.thinking_reader is None else self.thinking_reader.of(messages, with_tools, kwargs, budget_for)


class ModelRegistry:
    """Models by name and alias; the first one is the default."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Raises ValueError when two share a name. None: all turns are for opaque workers."""
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in self._models:
            for name in (model.name, *model.aliases):
                if name in self._by_name:
                    raise ValueError(f"two models are named '{name}'; rename one")
                self._by_name[name] = model

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """In the order configured."""
        return self._models

    def find(self, name: str | None, also: Sequence[str] = ()) -> ServedModel:
        """The model of this name, the default for None. Raises TurnError 404 that names those there are, `also` among them."""
        if name is None:
            if self._models:
                return self._models[0]
            raise TurnError(400, "invalid_request", "model: this field is missing.", param="model")
        model = self._by_name.get(name)
        if model is None:
            known = ", ".join(f"'{known}'" for known in [*self._by_name, *also][:16])
            raise TurnError(
                404, "model_not_found", f"There is no model '{name[:128]}' here. Models are: {known}.", param="model"
            )
        return model
