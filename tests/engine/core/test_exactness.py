"""Greedy tokens of the engine equal those of transformers in float32, whatever else goes on in the engine."""

import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt

from engine.models.registry import load_model
from tests.transformers_reference import reference_greedy

MODELS = {
    "llama": ("llama", {}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}
LENGTHS = [1, 3, 4, 5, 17, 40, 64]
GENERATED = 24


class Case:
    """A model and what transformers generates with it for some prompts."""

    def __init__(self, directory):
        from transformers import AutoModelForCausalLM

        self.model = load_model(directory, dtype=torch.float32)
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        self.prompts = [random_prompt(length, length) for length in LENGTHS]
        self.prompts.append(self.prompts[-1][:50] + random_prompt(99, 9))  # shares a prefix with the longest
        self.expected = [reference_greedy(reference, prompt, GENERATED) for prompt in self.prompts]

    def add_all(self, driver, **settings):
        for index, prompt in enumerate(self.prompts):
            driver.add(f"r{index}", prompt, max_tokens=GENERATED, **settings)

    def check(self, seen, choices=1, skip=()):
        for index, expected in enumerate(self.expected):
            if index in skip:
                continue
            for choice in range(choices):
                assert seen[f"r{index}"].tokens[choice] == expected, f"request {index}, choice {choice}"


@pytest.fixture(params=MODELS, scope="module")
def case(request, tiny_checkpoint):
    arch, overrides = MODELS[request.param]
    return Case(tiny_checkpoint(arch, **overrides))


def test_alone(case):
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        assert len(set(expected)) > 2
        assert generate(make_engine(case.model), prompt, max_tokens=GENERATED) == [expected]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_batched_at_other_block_sizes(case, block_size):
    driver = Driver(make_engine(case.model, block_size=block_size, num_blocks=1024))
    case.add_all(driver)
    case.check(driver.run())


@pytest.mark.parametrize("budget", [8, 11, 23])
def test_prefill_in_odd_chunks_beside_decode(case, budget):
    driver = Driver(make_engine(case.model, max_num_batched_tokens=budget))
    case.add_all(driver)
    case.check(driver.run())
    assert driver.engine.stats().steps_total > sum(LENGTHS) / budget


def test_with_prefix_hits(case):
    driver = Driver(make_engine(case.model))
    case.add_all(driver)
    driver.run()
    driver.seen.clear()
    case.add_all(driver)
    case.check(driver.run())
    for index, prompt in enumerate(case.prompts):
        assert driver.seen[f"r{index}"].done.cached_tokens == (len(prompt) - 1) // 4 * 4


def test_a_second_turn_reuses_what_the_first_generated(case):
    prompt, expected = case.prompts[4], case.expected[4]
    engine = make_engine(case.model)
    generate(engine, prompt, max_tokens=10)
    driver = Driver(engine)
    driver.add("turn", prompt + expected[:10], max_tokens=GENERATED - 10)
    seen = driver.run()["turn"]
    assert seen.tokens[0] == expected[10:]
    assert seen.done.cached_tokens == 24  # 27 tokens known, of which 26 have KV: six blocks of four


def test_without_prefix_cache(case):
    driver = Driver(make_engine(case.model, prefix_caching=False))
    case.add_all(driver)
    case.check(driver.run())
    assert driver.engine.take_events() == []
    assert driver.engine.stats().cached_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(case, caching):
    driver = Driver(make_engine(case.model, num_blocks=40, prefix_caching=caching))
    case.add_all(driver)
    case.check(driver.run())
    assert driver.engine.stats().preemptions_total > 0
    assert sum(seen.done.preemptions for seen in driver.seen.values()) == driver.engine.stats().preemptions_total


@pytest.mark.parametrize("num_blocks", [256, 60])
def test_several_choices(case, num_blocks):
    driver = Driver(make_engine(case.model, num_blocks=num_blocks))
    case.add_all(driver, n=3)
    case.check(driver.run(), choices=3)
    done = driver.seen["r5"].done
    assert (done.prompt_tokens, done.completion_tokens) == (40, 3 * GENERATED)


def test_while_neighbours_are_aborted(case):
    driver = Driver(make_engine(case.model, num_blocks=60, max_num_batched_tokens=16))
    case.add_all(driver)
    aborted = {1, 4, 6}
    for step, index in zip((1, 4, 9), sorted(aborted), strict=True):
        while driver.engine.stats().steps_total < step:
            driver.step()
        assert driver.engine.abort(f"r{index}")
        driver.engine.check_integrity()
    case.check(driver.run(), skip=aborted)
    assert driver.engine.stats().aborted_total == 3
