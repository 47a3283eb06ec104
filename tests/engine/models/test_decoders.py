"""Native decoders against transformers on tiny random checkpoints, in float32."""

import pytest
import torch
from dense_attention import DenseAttention, greedy, reference_logits, reference_model, run

from engine.models.layers import Linear
from engine.models.registry import load_model
from tests.transformers_reference import reference_greedy

CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-wide-heads": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 32}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-window-switched-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-window": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "head_dim": 24},
    ),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
PROMPT = [int(id_) for id_ in torch.randint(3, 320, (37,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture(params=CASES, scope="module")
def case(request, tiny_checkpoint):
    arch, overrides = CASES[request.param]
    directory = tiny_checkpoint(arch, **overrides)
    return directory, load_model(directory, dtype=torch.float32), reference_model(directory)


def test_logits_equal_transformers(case):
    _, loaded, reference = case
    attention = DenseAttention(loaded.spec)
    logits = run(loaded.decoder, PROMPT, attention)
    assert logits.dtype == torch.float32
    assert attention.calls == list(range(loaded.spec.num_layers))
    expected = reference_logits(reference, PROMPT)
    assert expected.std() > 0.5, "the comparison needs logits that differ from each other"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_greedy_rollout_equals_transformers(case, chunk):
    _, loaded, reference = case
    tokens = greedy(loaded.decoder, loaded.spec, PROMPT, 48, chunk)
    assert tokens == reference_greedy(reference, PROMPT, 48)
    assert len(set(tokens)) > 3, "a rollout that repeats one token proves little"


def test_spec_is_what_transformers_reads(case):
    _, loaded, reference = case
    config, spec = reference.config, loaded.spec
    assert spec.architecture == type(reference).__name__
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (64, 3, 4)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == reference.model.layers[0].self_attn.head_dim
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    assert spec.max_context == spec.max_position == 256
    assert spec.kv_bytes_per_token(2) == 3 * 2 * spec.num_kv_heads * spec.head_dim * 2
    for index, attention in enumerate(spec.attention):
        assert attention.scale == reference.model.layers[index].self_attn.scaling
        window = getattr(reference.model.layers[index].self_attn, "sliding_window", getattr(config, "sliding_window", None))
        assert attention.window == window


def test_a_window_hides_what_lies_outside_it(tiny_checkpoint):
    """The last token of a one-layer model must not depend on tokens outside the window, and must depend on its edge."""
    loaded = load_model(tiny_checkpoint("mistral", sliding_window=4, num_hidden_layers=1), dtype=torch.float32)
    last = [run(loaded.decoder, ids, DenseAttention(loaded.spec))[-1] for ids in ([9, *PROMPT[:4]], [8, *PROMPT[:4]])]
    assert torch.equal(*last)
    edge = [run(loaded.decoder, ids, DenseAttention(loaded.spec))[-1] for ids in ([9, *PROMPT[:3]], [8, *PROMPT[:3]])]
    assert not torch.equal(*edge)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tiny_checkpoint, arch):
    directory = (
        tiny_checkpoint(arch, dtype="bfloat16", mlp_bias=True) if arch == "llama" else tiny_checkpoint(arch, dtype="bfloat16")
    )
    exact = reference_logits(reference_model(directory), PROMPT)
    loaded = load_model(directory, dtype=torch.bfloat16)
    assert loaded.decoder.dtype == torch.bfloat16
    ours = run(loaded.decoder, PROMPT, DenseAttention(loaded.spec))
    theirs = reference_logits(reference_model(directory, torch.bfloat16), PROMPT)
    error, reference_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert error < 1.2 * reference_error
    assert reference_error < 0.1 * exact.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_equals_the_same_row_among_many(tiny_checkpoint, dtype):
    loaded = load_model(tiny_checkpoint("qwen2"), dtype=dtype)
    hidden = loaded.decoder.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention(loaded.spec))
    many = loaded.decoder.logits(hidden)
    for row in (0, 7, 36):
        torch.testing.assert_close(
            loaded.decoder.logits(hidden[row : row + 1])[0],
            many[row],
            rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-5,
        )
    assert loaded.decoder.logits(hidden[:0]).shape == (0, loaded.spec.vocab_size)


class RowwiseAttention:
    """Stands in for attention where rows shall not meet: mixes a token's own q and v only."""

    def __call__(self, layer, q, k, v):
        return q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def rows_beside(loaded, ids):
    """(rows, start, logits of those rows alone, logits of the same rows among all)"""
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))

    def logits(part):
        return loaded.decoder.logits(loaded.decoder.forward(tokens[part], positions[part], RowwiseAttention()))

    every = logits(slice(None))
    for rows in (1, 2, 3, 5, 16, 17, 33):
        for start in (0, 4):
            part = slice(start, start + rows)
            yield rows, start, logits(part), every[part]


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="bits are promised for AVX512 kernels only")
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_rows_do_not_depend_on_their_neighbours(tiny_checkpoint, arch):
    """To the last bit: how a step was batched or chunked must not show in a token's logits."""
    loaded = load_model(
        tiny_checkpoint(arch, intermediate_size=1536, hidden_size=576, num_attention_heads=4), dtype=torch.float32
    )
    for rows, start, alone, among in rows_beside(loaded, PROMPT):
        assert torch.equal(alone, among), (rows, start)


def test_float32_rows_of_smollm2_hardly_depend_on_their_neighbours(smollm2_dir):
    loaded = load_model(smollm2_dir, dtype=torch.float32)
    exact = torch.backends.cpu.get_cpu_capability() == "AVX512"
    for rows, start, alone, among in rows_beside(loaded, PROMPT):
        assert torch.equal(alone, among) if exact else torch.allclose(alone, among, atol=1e-3), (rows, start)


def test_smollm2_equals_transformers(smollm2_dir):
    from tokenizers import Tokenizer

    text = "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"
    prompt = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids
    loaded, reference = load_model(smollm2_dir, dtype=torch.float32), reference_model(smollm2_dir)
    logits = run(loaded.decoder, prompt, DenseAttention(loaded.spec))
    torch.testing.assert_close(logits, reference_logits(reference, prompt), rtol=0, atol=1e-3)
    assert greedy(loaded.decoder, loaded.spec, prompt, 40, chunk=11) == reference_greedy(reference, prompt, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 64), (151, 33), (1, 7)])
def test_a_packed_weight_can_be_had_plain(dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = Linear(weight.clone())
    assert torch.equal(layer.plain_weight(), weight)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight))
