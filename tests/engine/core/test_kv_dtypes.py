"""KV memory of other dtypes than the weights': its size, its name, what it costs in precision, and the books."""

import shutil
from pathlib import Path

import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt
from tokenizers import Tokenizer

from engine.config import ConfigError, EngineConfig
from engine.forward import LayeredForward
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.interface import StepBatch
from engine.kernels.reference import ReferenceAttention
from engine.kv_layout import KVLayout
from engine.kv_memory import kv_budget
from engine.models.registry import load_model
from engine.runner import Runner, allocate_kv
from engine.sampling.sampler import Sampler

NAMES = ("float32", "bfloat16", "float16", "int8")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("qwen2"), dtype=torch.float32)  # 3 layers, 2 KV heads of 16 dims


def test_a_block_is_as_large_as_its_dtype_says(model):
    values = 16 * 3 * 2 * 2 * 16
    wanted = {
        "auto": values * 4,
        "float32": values * 4,
        "bfloat16": values * 2,
        "float16": values * 2,
        "int8": values * 20 // 16,
    }
    for name, size in wanted.items():
        layout = KVLayout.of(model, 16, name)
        kv = allocate_kv(model, 5, 16, name)
        assert layout.block_bytes == size
        assert kv[0].nbytes == size
        config = EngineConfig(model=Path("tiny"), kv_dtype=name, kv_memory_bytes=10 * size)
        forward = LayeredForward(model.decoder, ReferenceAttention())
        budget = kv_budget(config, model, forward, Sampler(model.spec.vocab_size))
        assert (budget.num_blocks, budget.block_bytes) == (10, size)


def test_kv_is_shared_only_with_the_same_dtype(model):
    namespaces = {name: make_engine(model, kv_dtype=name).info.namespace for name in ("auto", *NAMES)}
    assert namespaces["auto"] == namespaces["float32"]
    assert len(set(namespaces.values())) == 4


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"kv_dtype is 'fp8'; it must be auto, .* or int8"):
        EngineConfig(model=Path("tiny"), kv_dtype="fp8")


@pytest.mark.parametrize("kv_dtype", NAMES[1:])
def test_preempted_and_forked_requests_get_the_tokens_they_would_get_alone(tiny_checkpoint, kv_dtype):
    """In float64, so that rounding in the layers cannot turn a near tie."""
    model = load_model(tiny_checkpoint("llama", num_hidden_layers=2), dtype=torch.float64)
    prompts = [random_prompt(seed, length) for seed, length in enumerate((30, 17, 30, 9))]
    ask = {"max_tokens": 20, "n": 2, "temperature": 1.0, "seed": 5}
    alone = [generate(make_engine(model, kv_dtype=kv_dtype, prefix_caching=False), prompt, **ask) for prompt in prompts]
    driver = Driver(make_engine(model, kv_dtype=kv_dtype, num_blocks=26, max_num_batched_tokens=24))
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, **ask)
    driver.run()  # checks the books after every step
    assert driver.engine.stats().preemptions_total > 0
    for index, tokens in enumerate(alone):
        assert [driver.seen[f"r{index}"].tokens[choice] for choice in range(2)] == tokens


def whole(ids, begin, end):
    """The tokens [begin, end) of one sequence whose blocks are 0, 1, 2, ..."""
    positions = torch.arange(begin, end)
    return StepBatch(
        token_ids=ids[begin:end],
        positions=positions,
        slots=positions,
        query_start=torch.tensor([0, end - begin], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(-(-end // 16), dtype=torch.int32).unsqueeze(0),
        query_start_list=(0, end - begin),
        context_lens_list=(end,),
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")
def test_what_a_kv_dtype_costs_in_precision(smollm2_dir, tmp_path):
    """Logits of the embedded model over a real text, in float32 but for KV, against KV in float32."""
    model = load_model(smollm2_dir, dtype=torch.float32)
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "architecture.md").read_text()
    tokens = torch.tensor(Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids[:2048])
    forward = LayeredForward(model.decoder, CpuAttention.build(64, torch.get_num_threads(), tmp_path))
    length = len(tokens)
    assert length > 1500

    def logits(kv_dtype):
        runner = Runner(forward, allocate_kv(model, -(-length // 16), 16, kv_dtype))
        runner.run(whole(tokens, 0, length - 600), [])
        return runner.run(whole(tokens, length - 600, length), range(600))

    wanted = logits("float32")
    centred = wanted - wanted.mean(-1, keepdim=True)
    errors = {}
    for name in ("bfloat16", "int8"):
        got = logits(name)
        errors[name] = float((got - wanted).norm() / centred.norm())
        top = float((got.argmax(-1) == wanted.argmax(-1)).float().mean())
        print(f"{name}: relative error of the logits {errors[name]:.5f}, same first token {top:.1%}")
        assert top > 0.95
    assert errors["bfloat16"] < 0.02
    assert errors["int8"] < 0.05
