"""The native bfloat16 forward pass against the float32 layers, for every architecture, however tokens are cut into steps."""

import shutil

import pytest
import torch
from variants import load_with_amx

from engine.forward import LayeredForward
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
def library(tmp_path_factory):
    return load_with_amx(32, tmp_path_factory.mktemp("kernels"))


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
def test_logits_are_as_close_to_float32_as_bfloat16_allows(tiny_checkpoint, library, arch, threads):
    path = tiny_checkpoint(arch, dtype="bfloat16", **SHAPE, **CASES[arch])
    precise = load_model(path, dtype=torch.float32)
    coarse = load_model(path, dtype=torch.bfloat16)
    team = library.team(threads)
    native = native_decoder(coarse.decoder, library, team)
    torch.manual_seed(3)
    lengths = (70, 33, 17)
    ids = [torch.randint(0, precise.spec.vocab_size, (length,)) for length in lengths]
    whole = step(ids, [(i, 0, length) for i, length in enumerate(lengths)], 5)
    every_row = list(range(sum(lengths)))

    def logits(forward, model):
        kv = allocate_kv(model, 16, 16).fill_(torch.nan)
        return forward.run(whole, kv, every_row)

    wanted = logits(LayeredForward(precise.decoder, ReferenceAttention()), precise)
    layered = logits(LayeredForward(coarse.decoder, ReferenceAttention()), coarse)
    got = logits(native, coarse)
    error, allowed = ((x - wanted).norm() / wanted.norm() for x in (got, layered))
    assert error <= 1.25 * allowed
    assert error < 0.02

    # The same tokens in steps of mixed prefill and decode.
    kv = allocate_kv(coarse, 16, 16).fill_(torch.nan)
    native.run(step(ids, [(0, 0, 37), (1, 0, 1)], 5), kv, [])
    native.run(step(ids, [(1, 1, 32), (0, 37, 38), (2, 0, 16)], 5), kv, [0])
    parts = step(ids, [(0, 38, 70), (1, 32, 33), (2, 16, 17)], 5)
    last = native.run(parts, kv, [31, 32, 33])
    at_once = got[[69, 102, 119]]
    assert (last - at_once).norm() / at_once.norm() < 0.01
    team.close()


def test_what_cannot_run_natively_says_why(tiny_checkpoint, library):
    fits = tiny_checkpoint("llama", **SHAPE)
    assert "float32" in why_not_native(load_model(fits, dtype=torch.float32).decoder, library)
    assert why_not_native(load_model(fits, dtype=torch.bfloat16).decoder, library) is None
    odd = tiny_checkpoint("llama", **SHAPE | {"intermediate_size": 200})
    assert "intermediate_size 200" in why_not_native(load_model(odd, dtype=torch.bfloat16).decoder, library)
    biased = load_model(tiny_checkpoint("llama", **SHAPE, attention_bias=True), dtype=torch.bfloat16)
    assert "biases" in why_not_native(biased.decoder, library)
    with pytest.raises(ValueError, match="biases"):
        native_decoder(biased.decoder, library, library.team(1))
