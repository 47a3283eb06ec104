"""Models for the tests of histories: real merges, and the special tokens and templates of well-known families."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.config import ModelConfig
from gateway.models import ServedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from chat_template_texts import GEMMA, HERMES_3, LLAMA_3, MISTRAL, QWEN_2_5, QWEN_3, STRING_ARGUMENTS

FAMILIES = {
    "qwen2.5": (QWEN_2_5, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3": (QWEN_3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": (LLAMA_3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": (
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "hermes3": (HERMES_3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "strings": (STRING_ARGUMENTS, (), "<|im_end|>"),
}  # fmt: skip


def write_family(directory, smollm2_dir, name, *, change=None):
    """A model directory with SmolLM2's merges and a family's special tokens and template. `change` gets the tokenizer."""
    template, special, eos = FAMILIES[name]
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if change is not None:
        tokenizer = change(tokenizer) or tokenizer
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos = special[0] if special else "<|endoftext|>"
    config = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def family_model(smollm2_dir, tmp_path_factory):
    """family_model(name) -> ServedModel; "smollm2" is the model as it is."""
    made = {}

    def make(name):
        if name not in made:
            directory = smollm2_dir
            if name != "smollm2":
                directory = write_family(tmp_path_factory.mktemp("family") / name, smollm2_dir, name)
            made[name] = ServedModel.load(ModelConfig(name, directory))
        return made[name]

    return make
