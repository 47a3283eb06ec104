"""A draft model is taken when it has the same tokens, and its memory comes out of what there is."""

import pytest
from click.testing import CliRunner
from engine_harness import generate, random_prompt

from cli.engine import command
from engine.config import ConfigError, DraftModelConfig, EngineConfig
from engine.loading import load_engine
from engine.speculation.draft_loading import check_same_tokens


@pytest.fixture(scope="module")
def directories(tiny_checkpoint):
    return tiny_checkpoint("llama", num_hidden_layers=2), tiny_checkpoint("qwen3", num_hidden_layers=1, seed=5)


def config(directories, **settings):
    draft = {"model": directories[1]} | settings.pop("draft", {})
    settings = {"kv_memory_bytes": 4 << 20, "kernels": "reference", "dtype": "float32", "block_size": 4} | settings
    return EngineConfig(model=directories[0], draft=DraftModelConfig(**draft), **settings)


def held(engine):
    """Blocks and bytes of both."""
    drafter = engine._speculator._drafters[-1]
    ours, theirs = engine._runner._kv, drafter._runner._kv
    assert drafter.cache.pool.num_blocks == theirs.shape[0]
    return ours.shape[0], theirs.shape[0], ours.nbytes, theirs.nbytes


def test_its_memory_comes_out_of_what_there_is(directories, tmp_path):
    engine = load_engine(config(directories), cache_dir=tmp_path)
    _, _, ours, theirs = held(engine)
    assert ours + theirs <= 4 << 20
    assert theirs <= (4 << 20) / 8
    assert ours > (4 << 20) * 0.85
    prompt = random_prompt(1, 20)
    (expected,) = generate(engine, prompt, max_tokens=20)
    engine.close()
    alone = EngineConfig(model=directories[0], num_blocks=64, kernels="reference", dtype="float32", max_draft_tokens=0)
    plain = load_engine(alone, cache_dir=tmp_path)
    assert generate(plain, prompt, max_tokens=20) == [expected]
    plain.close()


def test_blocks_that_were_asked_for_stay(directories, tmp_path):
    engine = load_engine(config(directories, num_blocks=100, draft={"kv_bytes": 1 << 16}), cache_dir=tmp_path)
    ours, _, _, theirs = held(engine)
    assert ours == 100
    assert theirs <= 1 << 16
    engine.close()


@pytest.mark.parametrize("draft", [{"kv_bytes": 100}, {"kv_bytes": 1 << 30}])
def test_memory_that_does_not_go_round_is_a_sentence(directories, tmp_path, draft):
    with pytest.raises(ConfigError, match=r"The draft model's KV memory holds \d+ blocks .*draft-kv-memory"):
        load_engine(config(directories, draft=draft), cache_dir=tmp_path)


def test_other_tokens_are_refused(directories, smollm2_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"has other tokens than .*: id \d+ is .* there and .* here\. Give a draft model"):
        check_same_tokens(directories[0], smollm2_dir)
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing, so nobody knows"):
        check_same_tokens(directories[0], tmp_path)
    check_same_tokens(directories[0], directories[1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-tokens", "3"], "--draft-tokens is about a draft model; name one with --draft-model."),
        (["--draft-model", "x", "--max-draft-batch", "0"], "--draft-model guesses nothing with --max-draft-batch 0"),
        (["--draft-model", "x", "--simulate"], "A simulated replica has nothing to guess; leave --draft-model out."),
        (["--draft-model", "x", "--draft-kv-memory", "50%"], "--draft-kv-memory is a number of bytes, not a share."),
    ],
)
def test_options_that_mean_nothing_are_refused(options, sentence):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_settings_that_cannot_work_are_refused(directories):
    with pytest.raises(ConfigError, match="A draft model guesses nothing where"):
        config(directories, max_draft_tokens=0)
    with pytest.raises(ConfigError, match="draft tokens is 0"):
        config(directories, draft={"tokens": 0})
