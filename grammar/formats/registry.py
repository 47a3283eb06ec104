"""Which format a model writes: recognised by its chat template, or named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from grammar.formats.base import ToolFormat
from grammar.formats.deepseek import DeepSeekFormat
from grammar.formats.glm import GlmFormat
from grammar.formats.harmony import HarmonyFormat
from grammar.formats.hermes import HermesFormat
from grammar.formats.llama import LlamaJsonFormat, PythonicFormat
from grammar.formats.mistral import MistralFormat, MistralJsonFormat
from grammar.formats.qwen3_coder import Qwen3CoderFormat
from grammar.limits import DEFAULT_LIMITS, GrammarLimits

_FORMATS: dict[str, Callable[[GrammarLimits, frozenset[str]], ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": LlamaJsonFormat,
    "pythonic": PythonicFormat,
    "mistral": MistralFormat,
    "mistral_json": MistralJsonFormat,
    "mistral_json_spaced": partial(MistralJsonFormat, space=" "),
    "qwen3_coder": Qwen3CoderFormat,
    "deepseek_v3": partial(DeepSeekFormat, fenced=True),
    "deepseek_v31": DeepSeekFormat,
    "harmony": HarmonyFormat,
    "glm": GlmFormat,
    "glm47": partial(GlmFormat, line=""),
}

FORMAT_NAMES = tuple(_FORMATS)


def recognised(chat_template: str | None) -> str:
    """The name of the format whose markers a template contains; hermes for a template without any (and for none)."""
    template = chat_template or ""
    if "<|channel|>" in template:
        return "harmony"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<arg_key>" in template:
        lines = "</arg_key>\n" in template or "</arg_key>\\n" in template
        return "glm" if lines else "glm47"
    if "<function=" in template:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return "mistral"
        return "mistral_json_spaced" if "[TOOL_CALLS] [" in template else "mistral_json"
    if "<tool_call>" in template:
        return "hermes"
    if "func_name1(" in template:
        return "pythonic"
    if '"parameters": ' in template and ("<|start_header_id|>" in template or "<|header_start|>" in template):
        return "llama3_json"
    return "hermes"


def format_for(
    chat_template: str | None, limits: GrammarLimits = DEFAULT_LIMITS, special_tokens: frozenset[str] = frozenset()
) -> ToolFormat:
    """The format a template speaks of. `special_tokens`: those of the model's tokenizer."""
    return _FORMATS[recognised(chat_template)](limits, special_tokens)


def format_named(name: str, limits: GrammarLimits = DEFAULT_LIMITS, special_tokens: frozenset[str] = frozenset()) -> ToolFormat:
    """The format of this name. Raises KeyError with a sentence that lists the names there are."""
    make = _FORMATS.get(name)
    if make is None:
        raise KeyError(f"There is no tool-call format named {name!r}; known are: {', '.join(_FORMATS)}.")
    return make(limits, special_tokens)
