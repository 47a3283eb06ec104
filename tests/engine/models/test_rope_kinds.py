"""Every kind of rotary scaling against transformers: frequencies, and whole models beyond the original context."""

import json
import shutil

import pytest
import torch
from dense_attention import DenseAttention, greedy, reference_logits, reference_model, run

from engine.checkpoints import CheckpointError
from engine.models.registry import load_model, read_spec
from engine.models.rope import inverse_frequencies, rope_table, rotate
from tests.transformers_reference import reference_greedy

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": YARN | {"mscale": 0.9},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}
LONG = [int(id_) for id_ in torch.randint(3, 320, (100,), generator=torch.Generator().manual_seed(3))]


def checkpoint(tiny_checkpoint, parameters, arch="llama", **overrides):
    return tiny_checkpoint(arch, rope_parameters={"rope_theta": 5000.0} | parameters, **overrides)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_frequencies_equal_transformers(tiny_checkpoint, kind, head_dim):
    directory = checkpoint(tiny_checkpoint, KINDS[kind], head_dim=head_dim)
    rotary = reference_model(directory).model.rotary_emb
    frequencies, scale = inverse_frequencies(read_spec(directory).rope)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dynamic"])
def test_logits_beyond_the_original_context(tiny_checkpoint, kind):
    directory = checkpoint(tiny_checkpoint, KINDS[kind])
    loaded, reference = load_model(directory, dtype=torch.float32), reference_model(directory)
    logits = run(loaded.decoder, LONG, DenseAttention(loaded.spec))
    torch.testing.assert_close(logits, reference_logits(reference, LONG), rtol=0, atol=1e-4)
    assert greedy(loaded.decoder, loaded.spec, LONG, 40, chunk=33) == reference_greedy(reference, LONG, 40)


@pytest.mark.parametrize("length", [20, 40])
def test_dynamic_grows_past_the_original_context_like_transformers(tiny_checkpoint, length):
    """A prompt within the context of training, and generation far beyond it."""
    directory = checkpoint(tiny_checkpoint, KINDS["dynamic"], max_position_embeddings=40)
    loaded = load_model(directory, dtype=torch.float32)
    assert loaded.spec.max_context == 120
    expected = reference_greedy(reference_model(directory), LONG[:length], 70)
    assert greedy(loaded.decoder, loaded.spec, LONG[:length], 70) == expected


def test_dynamic_logits_within_the_original_context(tiny_checkpoint):
    directory = checkpoint(tiny_checkpoint, KINDS["dynamic"], max_position_embeddings=100)
    loaded = load_model(directory, dtype=torch.float32)
    logits = run(loaded.decoder, LONG, DenseAttention(loaded.spec))
    torch.testing.assert_close(logits, reference_logits(reference_model(directory), LONG), rtol=0, atol=1e-4)


def test_dynamic_keys_do_not_depend_on_how_a_prompt_is_cut(tiny_checkpoint):
    """What lets a prefix beyond the original context be shared at all."""
    directory = checkpoint(tiny_checkpoint, KINDS["dynamic"], max_position_embeddings=40)
    loaded = load_model(directory, dtype=torch.float32)
    whole, pieces = DenseAttention(loaded.spec), DenseAttention(loaded.spec)
    run(loaded.decoder, LONG, whole)
    for start in range(0, 100, 7):
        run(loaded.decoder, LONG[start : start + 7], pieces, start)
    for a, b in zip(whole.keys, pieces.keys, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("mistral", {"sliding_window": 24}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {}),
    ],
)
def test_yarn_in_the_other_architectures(tiny_checkpoint, arch, overrides):
    directory = checkpoint(tiny_checkpoint, YARN, arch, **overrides)
    loaded = load_model(directory, dtype=torch.float32)
    logits = run(loaded.decoder, LONG, DenseAttention(loaded.spec))
    torch.testing.assert_close(logits, reference_logits(reference_model(directory), LONG), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
@pytest.mark.parametrize("word", ["type", "rope_type"])
def test_both_spellings_are_one_spec(tiny_checkpoint, tmp_path, kind, word):
    new = checkpoint(tiny_checkpoint, KINDS[kind])
    old = tmp_path / "old"
    shutil.copytree(new, old)
    config = json.loads((old / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[word] = scaling.pop("rope_type")
    if word == "type":
        scaling.pop("rope_type", None)
    config["rope_scaling"] = scaling
    (old / "config.json").write_text(json.dumps(config))
    assert read_spec(old) == read_spec(new)
    assert read_spec(old).rope.theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 1024),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.5}}, 384),
        ({"rope_parameters": YARN}, 256),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 256}}, 1024),
        ({"rope_parameters": LLAMA3}, 256),
    ],
)
def test_how_far_the_embedding_reaches(tiny_checkpoint, changes, context):
    spec = read_spec(tiny_checkpoint("llama", **changes))
    assert spec.max_position == 256
    assert spec.max_context == context
    cos, sin = rope_table(spec.rope, dtype=torch.float32, device=torch.device("cpu"))
    assert cos.shape == sin.shape == (context, 16)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    from engine.models.spec import RopeSpec

    spec = RopeSpec(kind="default", theta=100.0, dim=8, max_position=64, original_max_position=64)
    cos, sin = rope_table(spec, dtype=torch.float32, device=torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def at(x, position):
        rows = torch.tensor([position])
        return rotate(x, cos[rows].unsqueeze(1), sin[rows].unsqueeze(1))

    torch.testing.assert_close(at(q, 40).norm(), q.norm())
    torch.testing.assert_close((at(q, 11) * at(k, 4)).sum(), (at(q, 57) * at(k, 50)).sum(), rtol=1e-4, atol=1e-5)
    assert torch.equal(at(q, 0), q)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, ["longrope", "default, linear, dynamic, llama3, yarn"]),
        ({"rope_type": "linear", "factor": 0.5}, ["factor", "at least 1"]),
        ({"rope_type": "linear"}, ["factor", "missing"]),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "positive number", "'two'"]),
        ({"rope_type": "llama3", "factor": 2.0}, ["low_freq_factor", "missing"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"full_attention": {"rope_type": "default"}}, ["differ by layer"]),
    ],
)
def test_what_cannot_be_rotated_is_refused_in_a_sentence(tiny_checkpoint, tmp_path, parameters, words):
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = parameters
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, dtype=torch.float32)
    for word in ["config.json", *words]:
        assert word in str(caught.value)
