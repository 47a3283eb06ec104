"""Whole tiny models through the Triton kernels, in the engine: float32, token for token what transformers generates."""

import pytest
import torch
from dense_attention import reference_model
from engine_harness import Driver, make_engine, random_prompt

from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.operations import TritonOperations
from engine.models.registry import load_model
from engine.runner import Runner, allocate_kv
from tests.transformers_reference import reference_greedy

MODELS = {
    "llama": ("llama", {"num_attention_heads": 6, "hidden_size": 96}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
GENERATED = 4


def triton_forward(model):
    return LayeredForward(model.decoder, TritonAttention(), TritonOperations())


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(name, tiny_checkpoint):
    arch, overrides = MODELS[name]
    directory = tiny_checkpoint(arch, num_hidden_layers=2, **overrides)
    model, reference = load_model(directory, dtype=torch.float32), reference_model(directory)
    prompts = [random_prompt(length, length) for length in (1, 5, 37)]
    prompts.append(prompts[-1][:30] + random_prompt(99, 9))  # its prefix is found in the cache
    engine = make_engine(model, forward=triton_forward(model), max_num_batched_tokens=23)  # chunks beside decode
    driver = Driver(engine)
    for index, prompt in enumerate(prompts[:-1]):
        driver.add(f"r{index}", prompt, max_tokens=GENERATED)
    driver.run()
    driver.add("r3", prompts[-1], max_tokens=GENERATED)
    seen = driver.run()
    assert seen["r3"].started.cached_tokens >= 28
    for index, prompt in enumerate(prompts):
        assert seen[f"r{index}"].tokens[0] == reference_greedy(reference, prompt, GENERATED), f"prompt {index}"


@pytest.mark.parametrize("memory", ["int8", "float16"])
def test_logits_over_other_memory_are_those_of_the_reference_kernel(memory, tiny_checkpoint):
    from engine.batch import single_batch

    model = load_model(tiny_checkpoint("qwen2", num_hidden_layers=2), dtype=torch.float32)
    logits = []
    for forward in (LayeredForward(model.decoder, ReferenceAttention()), triton_forward(model)):
        runner = Runner(forward, allocate_kv(model, 4, 16, memory))
        runner.run(single_batch((2, 0, 3), 0, 30, 16), [29])
        logits.append(runner.run(single_batch((2, 0, 3), 30, 9, 16), [0, 8]))
    assert (logits[1] - logits[0]).norm() < 2e-3 * logits[0].norm()
