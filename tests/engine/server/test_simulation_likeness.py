"""A simulated replica in the likeness of a model on disk, and the sizes that the command reads."""

import json
import shutil

import click
import pytest
from tokenizers import Tokenizer

from cli.sizes import MemorySize
from engine.checkpoints import CheckpointError
from engine.simulate import SimulatedEngine
from engine.simulation.clock import VirtualClock
from engine.simulation.config import LETTER_TOKENS, SimulationConfig
from engine.simulation.likeness import likeness_of
from gateway.workers.protocol import Finished, GenerateRequest, SamplingParams, Tokens


def generated(core, **sampling):
    sampling = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **sampling})
    core.add(core.prepare(GenerateRequest(request_id="r", token_ids=list(range(30)), sampling=sampling)))
    chunks = []
    while core.has_work():
        chunks += [chunk for _, chunk in core.step()]
    (finished,) = [chunk for chunk in chunks if isinstance(chunk, Finished)]
    return [token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.token_ids], finished


def simulated(like, **changes):
    config = SimulationConfig(
        vocab_size=like.vocab_size,
        token_ids=like.token_ids,
        eos_token_ids=like.eos_token_ids,
        **{"mean_output_tokens": 0, **changes},
    )
    return SimulatedEngine(config, clock=VirtualClock(), tokenizer=like.tokenizer)


def test_words_come_back_as_the_ids_they_were(smollm2_dir):
    like = likeness_of(smollm2_dir)
    assert (like.vocab_size, like.max_model_len, like.eos_token_ids) == (49152, 8192, (2,))
    assert len(set(like.token_ids)) == 512
    tokens, _ = generated(simulated(like), max_tokens=200)
    text = like.tokenizer.decode(tokens)
    assert text.replace(" ", "").isalpha()
    assert like.tokenizer.encode(text, add_special_tokens=False).ids == tokens


def test_stop_strings_stop_where_the_text_says(smollm2_dir):
    like = likeness_of(smollm2_dir)
    tokens, _ = generated(simulated(like))
    stop = like.tokenizer.decode(tokens[10:12]).strip()
    cut, finished = generated(simulated(like), stop=(stop,))
    assert finished == Finished("stop", 0, stop)
    assert stop in like.tokenizer.decode(cut)
    assert cut == tokens[: len(cut)]
    assert len(cut) <= 12


def test_the_default_tokens_are_printable_where_nothing_is_known(smollm2_dir):
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    text = tokenizer.decode(list(LETTER_TOKENS))
    assert len(text) == len(LETTER_TOKENS)
    assert text.isascii()
    assert text.isprintable()


def test_a_small_vocabulary_and_several_end_tokens(tiny_checkpoint, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    like = likeness_of(model)
    assert (like.vocab_size, like.max_model_len, like.eos_token_ids) == (320, 256, (2, 1))
    assert like.token_ids
    assert max(like.token_ids) < 320
    tokens, finished = generated(simulated(like, mean_output_tokens=3), max_tokens=400)
    assert tokens[-1] == 2
    assert finished == Finished("stop")
    (model / "tokenizer.json").unlink()
    like = likeness_of(model)
    assert (like.tokenizer, like.token_ids) == (None, LETTER_TOKENS)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        likeness_of(model)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        likeness_of(tmp_path / "nowhere")


def test_grammars_are_taken_where_that_was_asked_for():
    request = GenerateRequest(request_id="r", token_ids=[1, 2, 3], grammar='{"type":"structural_tag"}')
    ignoring = SimulatedEngine(SimulationConfig(accept_grammars=True), clock=VirtualClock())
    assert ignoring.info.capabilities.grammars
    assert ignoring.prepare(request).prompt_tokens == 3
    assert not SimulatedEngine(SimulationConfig()).info.capabilities.grammars


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5g", 1_500_000_000),
        ("64ki", 65_536),
        ("4096", 4096),
        ("0.5", 0.5),
        ("1", 1.0),
        ("50%", 0.5),
        (" 100 % ", 1.0),
    ],
)
def test_sizes_are_bytes_or_shares(text, size):
    read = MemorySize().convert(text, None, None)
    assert read == size
    assert type(read) is type(size)


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "0%", "101%", "8GiBs", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter):
        MemorySize().convert(text, None, None)
