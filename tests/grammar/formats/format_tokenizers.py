"""A small vocabulary with the control tokens of another model family: what real ones add, as special tokens or as text."""

import json

from tokenizers import Tokenizer

SPECIAL = {
    "hermes": (),
    "llama3_json": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "pythonic": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "mistral": (
        "[TOOL_CALLS]",
        "[ARGS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[INST]",
        "[/INST]",
    ),
    "mistral_json": (
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[INST]",
        "[/INST]",
    ),
    "mistral_json_spaced": ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "qwen3_coder": (),
    "deepseek_v3": ("<｜User｜>", "<｜Assistant｜>"),
    "deepseek_v31": ("<｜User｜>", "<｜Assistant｜>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
    "glm": ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    # Here its tags are special tokens, so that formats of fields are tried with such, too.
    "glm47": (
        "<|user|>",
        "<|observation|>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
}
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<think>",
    "</think>",
)
_XML = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ADDED = {
    "hermes": _XML,
    "qwen3_coder": _XML,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "glm": (*_XML, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<think>", "</think>"),
}
"""Added tokens that count as text, as in the published tokenizers."""
ENDS = {"harmony": ("<|call|>", "<|return|>")}


def write_tokenizer(source, path, name):
    """A tokenizer.json for a format; returns (Tokenizer, ids that end a generation)."""
    tokenizer = json.loads(source.read_text())
    next_id = max(max(tokenizer["model"]["vocab"].values()), max(token["id"] for token in tokenizer["added_tokens"])) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for special, texts in ((True, SPECIAL[name]), (False, ADDED.get(name, ()))):
        for text in texts:
            tokenizer["added_tokens"].append({"id": next_id, "content": text, "special": special, **plain})
            next_id += 1
    path.write_text(json.dumps(tokenizer))
    made = Tokenizer.from_file(str(path))
    return made, (2, 0, *(made.token_to_id(end) for end in ENDS.get(name, ())))
