"""The figures against hand computation on a model with known logits, and verdicts on formats that are good and that are not."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.models.registry import load_model
from engine.quality import run
from engine.quality.config import FORMATS, Bounds, QualityConfig
from engine.quality.drift import Drift, drift, out_of_bounds
from engine.quality.observe import Observation, Subject, observe, tokens_of_work
from engine.quality.texts import bundled_text
from engine.runner import allocate_kv

VOCABULARY = 7


class Known:
    """A `Forward` whose logits depend only on the token before: row `token` of a table. Checks the batches it is given."""

    def __init__(self, table):
        self.table = table
        self.computed = []

    def run(self, batch, kv, rows):
        assert kv is None
        start = batch.context_lens_list[0] - batch.num_tokens
        assert batch.positions.tolist() == batch.slots.tolist() == list(range(start, batch.context_lens_list[0]))
        assert batch.block_tables.shape[1] * 4 >= batch.context_lens_list[0]
        self.computed.append((start, batch.num_tokens))
        return self.table[batch.token_ids[list(rows)]]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_perplexity_is_that_of_the_known_logits(chunk):
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    texts = [[3, 1, 4, 1, 5, 2, 6, 0], [2, 6], [0, 1, 2, 3, 4]]
    config = QualityConfig(chunk=chunk, sampled_rows=4, prompts=2, prompt_tokens=3, generated_tokens=5)
    progress = []
    known = Known(table)
    seen = observe(Subject(known, None, 4), texts, config, lambda done, total: progress.append((done, total)))
    pairs = [(a, b) for text in texts for a, b in itertools.pairwise(text)]
    surprises = [math.log(sum(math.exp(x) for x in table[a].tolist())) - table[a, b].item() for a, b in pairs]
    assert seen.surprise.tolist() == pytest.approx(surprises, rel=1e-5)
    assert seen.perplexity == pytest.approx(math.exp(sum(surprises) / len(surprises)), rel=1e-6)
    assert seen.choices.tolist() == [table[a].argmax().item() for a, _ in pairs]
    assert torch.equal(seen.logits, table[[a for a, _ in pairs][::3]])  # 12 positions, at most 4 of them
    # Only the first text is as long as a prompt and what is read after it.
    assert torch.equal(seen.decoded, table[[1, 5, 2, 6, 0]])
    assert known.computed[-10:] == [(0, 3), *((p, 1) for p in range(3, 8)), *((p, 1) for p in range(3, 7))]
    for start, chosen in zip(([3, 1, 4],), seen.generated, strict=True):
        token, expected = start[-1], []
        for _ in range(5):
            token = table[token].argmax().item()
            expected.append(token)
        assert list(chosen) == expected
    assert progress[-1] == (tokens_of_work(texts, config), tokens_of_work(texts, config))
    assert all(low < high for (low, _), (high, _) in itertools.pairwise(progress))


def observation(logits, follows, generated=((1, 2, 3), (4, 5, 6))):
    surprise = torch.logsumexp(logits, -1) - logits[torch.arange(len(follows)), follows]
    return Observation(surprise.double(), logits.argmax(-1), logits, logits[:50], generated)


def test_drift_is_that_of_the_formulas():
    generator = torch.Generator().manual_seed(4)
    reference = torch.randn(200, VOCABULARY, generator=generator)
    other = reference + 0.3 * torch.randn(200, VOCABULARY, generator=generator)
    follows = torch.randint(0, VOCABULARY, (200,), generator=generator)
    found = drift(observation(other, follows, ((1, 2, 0), (4, 5, 6))), observation(reference, follows))
    ratio = torch.nn.functional.cross_entropy(other, follows) - torch.nn.functional.cross_entropy(reference, follows)
    assert found.perplexity_ratio == pytest.approx(math.exp(ratio), rel=1e-5)
    assert found.agreement == pytest.approx((other.argmax(-1) == reference.argmax(-1)).float().mean().item())
    divergence = torch.nn.functional.kl_div(
        other.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found.divergence == pytest.approx(divergence.item(), rel=1e-4)
    assert found.logit_error == pytest.approx(((other - reference).norm() / reference.norm()).item(), rel=1e-5)
    decoded = torch.nn.functional.kl_div(
        other[:50].log_softmax(-1), reference[:50].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found.decode_divergence == pytest.approx(decoded.item(), rel=1e-4)
    assert (found.common_prefix, found.generated) == (2.5, 3)
    same = drift(observation(reference, follows), observation(reference, follows))
    assert (same.perplexity_ratio, same.agreement, same.divergence, same.logit_error, same.common_prefix) == (1, 1, 0, 0, 3)


def test_every_bound_counts_and_nan_keeps_none():
    bounds = Bounds(1.02, 0.95, 0.01)
    good = Drift(10.0, 1.02, 0.95, 0.01, 0.01, 0.5, 3, 48)
    assert out_of_bounds(good, bounds) == []
    assert "perplexity ratio 1.0300" in out_of_bounds(replace(good, perplexity_ratio=1.03), bounds)[0]
    assert "agreement 94.90%" in out_of_bounds(replace(good, agreement=0.949), bounds)[0]
    assert "divergence 0.0110" in out_of_bounds(replace(good, divergence=0.011), bounds)[0]
    assert "divergence in decode 0.0110" in out_of_bounds(replace(good, decode_divergence=0.011), bounds)[0]
    nan = float("nan")
    assert len(out_of_bounds(Drift(nan, nan, nan, nan, nan, nan, 0, 0), bounds)) == 4


SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# The choices of a model of random weights are close: its bounds are wider than those of one that was trained.
WIDE = {name: replace(format, bounds=Bounds(1.05, 0.85, 0.05)) for name, format in FORMATS.items()}
SMALL = QualityConfig(window=200, chunk=64, max_tokens=600, prompts=2, prompt_tokens=20, generated_tokens=6, formats=WIDE)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products: two threads would wait for each other longer than they compute, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 320, (190,), generator=generator).tolist() for _ in range(3)]


def plainly(change=lambda name, decoder: None):
    """A `Load` in plain torch that lets a test change the weights of a format."""

    def load(config, context, cache_dir):
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        model = load_model(config.model, dtype=dtype, quantization=config.quantization)
        change(config.quantization, model.decoder)
        kv = allocate_kv(model, -(-context // 16), 16, "auto")
        return Subject(LayeredForward(model.decoder, ReferenceAttention()), kv.fill_(torch.nan), 16)

    return load


def test_a_format_with_doubled_scales_is_not_ready(tiny_checkpoint, texts, caplog):
    def double(name, decoder):
        if name == "int8":
            for layer in decoder.layers:
                matrix = layer.mlp.down.quantized
                matrix.scale.mul_(2)
                matrix.minimum.mul_(2)

    engine = EngineConfig(model=tiny_checkpoint("llama", **SHAPE))
    measured = {v.format: v for v in run.measure(engine, ["int8", "bf16"], texts, SMALL, load=plainly(double))}
    assert list(measured) == ["bf16", "int8"]
    assert measured["bf16"].ready
    assert not measured["int8"].ready
    assert measured["int8"].drift.agreement < 0.7
    assert "int8 is not ready: agreement" in caplog.text
    honest = {v.format: v for v in run.measure(engine, ["int8"], texts, SMALL, load=plainly())}
    assert honest["int8"].ready
    assert honest["int8"].drift.agreement > measured["int8"].drift.agreement
    assert honest["int8"].drift.divergence < 0.2 * measured["int8"].drift.divergence


def test_the_engines_own_forward_pass_is_what_is_measured(tiny_checkpoint, texts, model_cache_dir):
    """Once with whatever the engine chooses here, once in plain torch: the same model, so nearly the same figures."""
    path = tiny_checkpoint("llama", **SHAPE)
    verdicts = []
    for kernels in ("auto", "reference"):
        engine = EngineConfig(model=path, kernels=kernels, threads=1)
        verdicts.append(list(run.measure(engine, ["bf16", "kv-int8"], texts, SMALL, cache_dir=model_cache_dir)))
    for ours, plain in zip(*verdicts, strict=True):
        assert ours.drift.perplexity == pytest.approx(plain.drift.perplexity, rel=0.02)
        assert ours.drift.logit_error < 0.05
        assert plain.drift.logit_error < 0.05
        assert ours.drift.decode_divergence < 0.01
        assert plain.drift.decode_divergence < 0.01


def test_references_are_measured_once_and_first(tiny_checkpoint, texts):
    order = []

    def report(name, done, total):
        if done == total:
            order.append(name)

    engine = EngineConfig(model=tiny_checkpoint("llama", **SHAPE))
    list(run.measure(engine, ["int4", "bf16", "int8", "int4"], texts, SMALL, load=plainly(), report=report))
    assert order == ["float32", "bf16", "int4", "int8"]
    order.clear()
    list(run.measure(engine, ["int4"], texts, SMALL, load=plainly(), report=report))
    assert order == ["bf16", "int4"]


def test_texts_are_cut_to_what_model_and_settings_hold(tiny_checkpoint):
    path = tiny_checkpoint("llama")  # 256 positions
    parts = run.windows([list(range(600)), [5], list(range(50))], path, QualityConfig(max_tokens=700))
    assert [len(part) for part in parts] == [256, 256, 88, 50]
    assert parts[1][0] == 256
    assert [len(part) for part in run.windows([[1] * 600], path, QualityConfig(max_tokens=300))] == [256, 44]
    with pytest.raises(ConfigError, match="two tokens"):
        run.windows([[1]], path, QualityConfig())


def test_formats_are_those_that_the_model_has(tiny_checkpoint, texts):
    path = tiny_checkpoint("llama")
    assert run.formats_of(path, QualityConfig()) == ("bf16", "int8", "int4", "kv-int8")
    with pytest.raises(ConfigError, match=r"no format int3.*bf16, int8, int4, gguf, kv-int8"):
        next(run.measure(EngineConfig(model=path), ["int3"], texts, SMALL))


def test_the_bundled_text_is_the_one_it_was():
    """Figures of different versions compare only over the same text."""
    import hashlib

    assert (
        hashlib.sha256(bundled_text().encode()).hexdigest()
        == "a44c48acfed2e45029f46c2f74f405271e0f4550f4be046ab4e6e190790d22ee"
    )
    assert set(FORMATS) == {"bf16", "int8", "int4", "gguf", "kv-int8"}
