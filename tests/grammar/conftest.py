"""A compiler for the real vocabulary, for each file of tests."""

import pytest
import torch
from hermes_walking import LOGITS, STOPS, Walker
from tokenizers import Tokenizer

from grammar.compiler import GrammarCompiler


@pytest.fixture(scope="module")
def tokenizer_json(smollm2_dir):
    return smollm2_dir / "tokenizer.json"


@pytest.fixture(scope="module")
def compiler(tokenizer_json):
    torch.set_num_threads(1)
    made = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def walker(tokenizer_json):
    return Walker(Tokenizer.from_file(str(tokenizer_json)))
