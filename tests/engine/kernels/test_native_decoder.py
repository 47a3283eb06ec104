"""The native forward pass against the float32 layers, for every architecture, however tokens are cut into steps."""

import shutil

import pytest
import torch
from variants import load_with_amx

from engine.forward import LayeredForward
from engine.kernels.cpu.library import load_library
from engine.kernels.cpu.matrix import Method
from engine.kernels.cpu.methods import MethodChoice, MethodTable
from engine.kernels.interface import StepBatch
from engine.kernels.reference import ReferenceAttention
from engine.models.native import native_decoder, why_not_native
from engine.models.registry import load_model
from engine.runner import allocate_kv

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler on this machine")

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CASES = {
    "llama": {},
    "mistral": {"sliding_window": 11},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
}


@pytest.fixture(scope="session")
def library(kernel_cache):
    return load_library(32, kernel_cache)


@pytest.fixture(scope="session")
def tables(library):
    """What is fastest here, for one thread and for two."""
    teams = {threads: library.team(threads) for threads in (1, 2)}
    yield {threads: MethodTable(library, team) for threads, team in teams.items()}
    for team in teams.values():
        team.close()


def logits(forward, model, ids, lengths, num_blocks):
    kv = allocate_kv(model, 3 * num_blocks + 1, 16)
    kv.fill_(torch.nan)
    whole = step(ids, [(i, 0, length) for i, length in enumerate(lengths)], num_blocks)
    return forward.run(whole, kv, list(range(sum(lengths))))


def step(token_ids, spans, num_blocks):
    """One batch over sequences that own `num_blocks` blocks each. spans: (sequence, begin, end) of what is computed."""
    starts, rows, slots, tables = [0], [], [], []
    for sequence, begin, end in spans:
        starts.append(starts[-1] + end - begin)
        rows += token_ids[sequence][begin:end].tolist()
        slots += [sequence * num_blocks * 16 + position for position in range(begin, end)]
        tables.append([sequence * num_blocks + block for block in range(num_blocks)])
    return StepBatch(
        token_ids=torch.tensor(rows),
        positions=torch.tensor([position for _, begin, end in spans for position in range(begin, end)]),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_start_list=tuple(starts),
        context_lens_list=tuple(end for _, _, end in spans),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("arch", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_as_close_to_float32_as_the_dtype_allows(tiny_checkpoint, library, tables, arch, threads, dtype):
    path = tiny_checkpoint(arch, dtype=dtype, **SHAPE, **CASES[arch])
    precise = load_model(path, dtype=torch.float32)
    coarse = load_model(path, dtype=getattr(torch, dtype))
    team = library.team(threads)
    table = tables[threads]
    native = native_decoder(coarse.decoder, library, team, table, table.half_format() if dtype == "bfloat16" else None)
    torch.manual_seed(3)
    # More than 48 tokens a thread: rows are shared out; fewer: columns are.
    for lengths in ((70, 33, 17), (29, 3, 1)):
        ids = [torch.randint(0, precise.spec.vocab_size, (length,)) for length in lengths]
        wanted = logits(LayeredForward(precise.decoder, ReferenceAttention()), precise, ids, lengths, 5)
        layered = logits(LayeredForward(coarse.decoder, ReferenceAttention()), coarse, ids, lengths, 5)
        got = logits(native, coarse, ids, lengths, 5)
        error, allowed = (float((x - wanted).norm() / wanted.norm()) for x in (got, layered))
        if dtype == "float32":
            assert error < 1e-5
        else:
            assert error < 0.02
            # Products summed in float16 (Method.HALF) are as good as bfloat16, not as float16 summed in float32.
            assert dtype == "float16" or error <= 1.25 * allowed

    # The same tokens in steps of mixed prefill and decode.
    lengths = (70, 33, 17)
    ids = [torch.randint(0, precise.spec.vocab_size, (length,)) for length in lengths]
    at_once = logits(native, coarse, ids, lengths, 5)[[69, 102, 119]]
    kv = allocate_kv(coarse, 16, 16).fill_(torch.nan)
    native.run(step(ids, [(0, 0, 37), (1, 0, 1)], 5), kv, [])
    native.run(step(ids, [(1, 1, 32), (0, 37, 38), (2, 0, 16)], 5), kv, [0])
    last = native.run(step(ids, [(0, 38, 70), (1, 32, 33), (2, 16, 17)], 5), kv, [31, 32, 33])
    assert (last - at_once).norm() / at_once.norm() < (1e-5 if dtype == "float32" else 0.03)
    team.close()


def test_on_amx_the_pass_computes_the_same(tiny_checkpoint, kernel_cache):
    library = load_with_amx(32, kernel_cache)
    path = tiny_checkpoint("qwen3", dtype="bfloat16", **SHAPE, **CASES["qwen3"])
    precise, coarse = load_model(path, dtype=torch.float32), load_model(path, dtype=torch.bfloat16)
    team = library.team(2)
    native = native_decoder(coarse.decoder, library, team, lambda _: MethodChoice(Method.AMX_BF16, Method.AMX_BF16, 0))
    for lengths in ((70, 33, 17), (29, 3, 1)):
        ids = [torch.randint(0, precise.spec.vocab_size, (length,)) for length in lengths]
        wanted = logits(LayeredForward(precise.decoder, ReferenceAttention()), precise, ids, lengths, 5)
        got = logits(native, coarse, ids, lengths, 5)
        assert (got - wanted).norm() / wanted.norm() < 0.02
    team.close()


@pytest.mark.parametrize("rows", [1, 3, 5, 12, 16, 100, 300])
def test_in_float32_a_token_of_a_short_context_has_the_same_bits_whatever_stands_beside_it(tiny_checkpoint, library, rows):
    """What token exactness over batches rests on: neighbours, their number, and who computes what change nothing."""
    model = load_model(tiny_checkpoint("llama", **SHAPE), dtype=torch.float32)
    team = library.team(2)
    native = native_decoder(model.decoder, library, team)
    ids = [torch.randint(0, model.spec.vocab_size, (40,), generator=torch.Generator().manual_seed(5))]
    ids += [torch.randint(0, model.spec.vocab_size, (1,)) for _ in range(rows)]
    kv = allocate_kv(model, (rows + 1) * 3, 16)
    alone = native.run(step(ids, [(0, 0, 40)], 3), kv, [39])
    beside = native.run(step(ids, [(i, 0, 1) for i in range(1, rows + 1)] + [(0, 0, 40)], 3), kv, [rows + 39])
    assert torch.equal(alone, beside)
    team.close()


def test_what_cannot_run_natively_says_why(tiny_checkpoint, library):
    assert why_not_native(load_model(tiny_checkpoint("llama", **SHAPE), dtype=torch.float32).decoder) is None
    odd = tiny_checkpoint("llama", **SHAPE | {"intermediate_size": 200})
    assert "intermediate_size 200" in why_not_native(load_model(odd, dtype=torch.bfloat16).decoder)
    biased = load_model(tiny_checkpoint("llama", **SHAPE, attention_bias=True), dtype=torch.bfloat16)
    assert "biases" in why_not_native(biased.decoder)
    with pytest.raises(ValueError, match="biases"):
        native_decoder(biased.decoder, library, library.team(1))
