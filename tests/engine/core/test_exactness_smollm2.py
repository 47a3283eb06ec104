"""The embedded model, greedy in float32: a chat of two turns beside others, chunked and preempted, equals transformers."""

import pytest
import torch
from engine_harness import Driver, make_engine
from tokenizers import Tokenizer

from engine.models.registry import load_model
from tests.transformers_reference import reference_greedy

GENERATED = 24
CHATS = [
    "What is the capital of France?",
    "List three prime numbers and say why they are prime.",
    "Write a haiku about the sea, then explain it to a child in two sentences.",
    "You are given a list of files: " + ", ".join(f"src/module_{i}.py" for i in range(40)) + ". Which is the last one?",
]


@pytest.fixture(scope="module")
def case(smollm2_dir):
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in CHATS]
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    expected = [reference_greedy(reference, prompt, GENERATED) for prompt in prompts]
    return load_model(smollm2_dir, dtype=torch.float32), prompts, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chats", "settings"),
    [
        (4, {"num_blocks": 256, "max_num_batched_tokens": 512}),
        (4, {"num_blocks": 64, "max_num_batched_tokens": 37}),
        (3, {"num_blocks": 8, "max_num_batched_tokens": 64}),
    ],
    ids=["batched", "odd chunks", "preempted"],
)
def test_greedy_tokens_equal_transformers(case, chats, settings):
    model, prompts, expected = case[0], case[1][:chats], case[2][:chats]
    driver = Driver(make_engine(model, block_size=16, max_model_len=512, **settings))
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, max_tokens=GENERATED, n=2 if index == 1 else 1)
    driver.run()
    for index, tokens in enumerate(expected):
        assert driver.seen[f"r{index}"].tokens[0] == tokens
    assert driver.seen["r1"].tokens[1] == expected[1]
    assert (driver.engine.stats().preemptions_total > 0) == (settings["num_blocks"] == 8)
    # The next turn of every chat, over what is still cached.
    for index, prompt in enumerate(prompts):
        driver.add(f"again{index}", prompt + expected[index][:12], max_tokens=GENERATED - 12)
    driver.run()
    for index, tokens in enumerate(expected):
        assert driver.seen[f"again{index}"].tokens[0] == tokens[12:]
    assert driver.engine.stats().cached_tokens_total > 0
