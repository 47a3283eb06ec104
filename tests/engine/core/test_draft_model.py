"""A draft model changes how many passes a generation takes, and nothing else; its books balance on every way."""

import hypothesis.strategies as st
import pytest
import torch
from engine_harness import EOS, SCHEMA, Driver, generate, make_engine, random_prompt
from hypothesis import given, settings
from tokenizers import Tokenizer

from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.kv_layout import KVLayout
from engine.models.registry import load_model
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.speculation.draft_model import DraftModel
from engine.speculation.ngram_drafter import NGramDrafter
from engine.speculation.worth import Worth
from grammar.compiler import GrammarCompiler
from grammar.detokenizer import Detokenizer
from offload.config import OffloadConfig


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(checkpoint):
    """float64, so that the shape of a pass cannot turn a near tie."""
    return load_model(checkpoint, dtype=torch.float64)


@pytest.fixture(scope="module")
def other(tiny_checkpoint):
    """Of another architecture, with random weights of its own: it guesses badly."""
    return load_model(tiny_checkpoint("qwen3", num_hidden_layers=1, seed=5), dtype=torch.float64)


@pytest.fixture(scope="module")
def texts(checkpoint, model):
    made = GrammarCompiler(checkpoint / "tokenizer.json", model.spec.vocab_size, (EOS,))
    yield {"grammars": made, "detokenizer": Detokenizer(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))}
    made.close()


def draft_model(draft, target, *, num_blocks=256, block_size=4, tokens=4, step=64, worth=None):
    runner = Runner(LayeredForward(draft.decoder, ReferenceAttention()), KVLayout.of(draft, block_size).allocate(num_blocks))
    return DraftModel(
        runner,
        Sampler(target.spec.vocab_size),
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=target.spec.vocab_size,
        draft_vocab_size=draft.spec.vocab_size,
        max_position=draft.spec.max_position,
        max_tokens=tokens,
        max_step_tokens=step,
        worth=worth,
    )


def drafting(driver):
    return driver.engine._speculator._drafters[-1]


def assert_empty(drafter):
    drafter.check_integrity()
    assert drafter.cache.pool.num_referenced == 0, "blocks of the draft model were lost"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 3, "top_p": 0.95, "repetition_penalty": 1.2}])
def test_a_model_that_drafts_for_itself_is_always_right(model, sampling):
    """Greedy, and sampled: both draw with the same random numbers."""
    prompt = random_prompt(1, 40)
    (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, max_tokens=60, **sampling)
    drafter = draft_model(model, model)
    engine = make_engine(model, drafters=[drafter])
    assert generate(engine, prompt, max_tokens=60, **sampling) == [expected]
    stats = engine.stats()
    (ours,) = stats.drafters
    assert (ours.name, ours.accepted_tokens_total) == ("model", ours.drafted_tokens_total)
    # The first token is the prompt's; five in each pass from then on, but for the last few.
    assert stats.decode_passes_total <= 13
    assert_empty(drafter)


def test_the_next_turn_finds_what_the_draft_model_computed(model):
    prompt = random_prompt(1, 40)
    drafter = draft_model(model, model, step=64)
    engine = make_engine(model, drafters=[drafter])
    (answer,) = generate(engine, prompt, max_tokens=30)
    passes = []
    run = drafter._runner.run
    drafter._runner.run = lambda batch, rows: passes.append(batch.num_tokens) or run(batch, rows)
    generate(engine, prompt + answer + random_prompt(2, 10), max_tokens=10)
    assert passes[0] <= 10 + 8, "it computed anew what it had"
    assert_empty(drafter)


def test_a_long_prompt_is_caught_up_with_in_parts(model):
    prompt = random_prompt(1, 100)
    (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, max_tokens=40)
    drafter = draft_model(model, model, step=16)
    engine = make_engine(model, drafters=[drafter])
    most = []
    run = drafter._runner.run
    drafter._runner.run = lambda batch, rows: most.append(batch.num_tokens) or run(batch, rows)
    assert generate(engine, prompt, max_tokens=40) == [expected]
    assert max(most) == 16
    assert engine.stats().accepted_tokens_total > 20


asks = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(5, 30),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([0, 5]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {7: 5.0, 200: -100.0}]),
        "n": st.sampled_from([1, 1, 2]),
        "stop_token_ids": st.sampled_from([(), tuple(range(40, 60))]),
        "stop": st.sampled_from([(), (), ("a",), ("1", "true")]),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, None, 2]),
        "grammar": st.sampled_from([None, None, SCHEMA]),
    }
)


@settings(deadline=None, max_examples=25)
@given(
    mix=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), asks, st.integers(0, 12)), min_size=1, max_size=4),
    who=st.sampled_from(["self", "self", "other", "ngram and self"]),
    tokens=st.integers(1, 6),
    batch=st.integers(1, 6),
    blocks=st.integers(32, 60),
    draft_blocks=st.integers(4, 60),
    budget=st.integers(8, 40),
    aborts=st.sets(st.integers(0, 3), max_size=2),
    caching=st.booleans(),
)
def test_whoever_drafts_everybody_gets_the_same_tokens(
    model, other, texts, mix, who, tokens, batch, blocks, draft_blocks, budget, aborts, caching
):
    """All parameters and grammars, few blocks in both pools, small steps, requests that come and go at any time."""
    plain, expected = make_engine(model, max_draft_tokens=0, **texts), {}
    for number, (seed, length, ask, _) in enumerate(mix):
        driver = Driver(plain)
        driver.add("only", random_prompt(seed, length), seed=number, **ask)
        expected[f"r{number}"] = driver.run()["only"]
    drafter = draft_model(other if who == "other" else model, model, num_blocks=draft_blocks, tokens=tokens, step=budget)
    engine = make_engine(
        model,
        **texts,
        num_blocks=blocks,
        max_num_batched_tokens=budget,
        max_draft_batch=batch,
        prefix_caching=caching,
        drafters=[NGramDrafter(), drafter] if who.startswith("ngram") else [drafter],
    )
    driver = Driver(engine)
    arrivals = sorted(range(len(mix)), key=lambda number: mix[number][3])
    for at in range(10_000):
        while arrivals and mix[arrivals[0]][3] <= at:
            number = arrivals.pop(0)
            seed, length, ask, _ = mix[number]
            driver.add(f"r{number}", random_prompt(seed, length), seed=number, **ask)
        for number in aborts:
            if number < len(mix) and at == mix[number][3] + 4:
                engine.abort(f"r{number}")
                engine.check_integrity()
        if not arrivals and not engine.has_work():
            break
        driver.step()
    driver.assert_idle()
    assert_empty(drafter)
    for number in range(len(mix)):
        seen, reference = driver.seen[f"r{number}"], expected[f"r{number}"]
        assert seen.failed is None
        if seen.done is None:
            assert number in aborts
            for index, came in seen.tokens.items():
                assert came == reference.tokens[index][: len(came)]
            continue
        assert seen.tokens == reference.tokens
        assert seen.finished == reference.finished
        for index, reported in seen.logprobs.items():
            assert [one.token_id for one in reported] == [one.token_id for one in reference.logprobs[index]]
            assert [one.logprob for one in reported] == pytest.approx([one.logprob for one in reference.logprobs[index]])
    if who == "self" and draft_blocks >= 60 and not any(ask["grammar"] for _, _, ask, _ in mix):
        for one in engine.stats().drafters:
            assert one.accepted_tokens_total == one.drafted_tokens_total


def test_tokens_are_exact_where_the_models_blocks_come_from_a_tier(model, tmp_path):
    """The draft model has no tier: what it lost it computes again, while the model loads."""
    plain = make_engine(model, max_draft_tokens=0)
    prompts = [random_prompt(seed, 60) for seed in range(6)]
    expected = [generate(plain, prompt, max_tokens=20)[0] for prompt in prompts]
    drafter = draft_model(model, model, num_blocks=40)
    offload = OffloadConfig(host_bytes=64 << 20, load="always", shared_memory=tmp_path)
    engine = make_engine(model, num_blocks=60, drafters=[drafter], offload=offload)
    driver = Driver(engine)
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            driver.add(f"{turn}-{number}", prompt, max_tokens=20)
        while engine.has_work() or engine.stats().loading:
            if engine.has_work():
                driver.step()
        driver.assert_idle()
        assert_empty(drafter)
        assert engine.wait_for_tiers(60)
        engine.clear_cache()
    for (turn, number), tokens in {(t, n): expected[n] for t in range(3) for n in range(len(prompts))}.items():
        assert driver.seen[f"{turn}-{number}"].tokens[0] == tokens
    assert sum(engine._tiers.loaded_blocks.values()) > 20
    assert engine.stats().accepted_tokens_total > 0
    engine.close()


def test_a_draft_model_that_breaks_costs_guesses_only(model):
    class Broken(LayeredForward):
        passes = 0

        def run(self, batch, kv, rows):
            Broken.passes += 1
            if Broken.passes > 3:
                raise RuntimeError("out of memory")
            return super().run(batch, kv, rows)

    prompt = random_prompt(1, 20)
    (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, max_tokens=40)
    drafter = draft_model(model, model)
    drafter._runner._forward = Broken(model.decoder, ReferenceAttention())
    engine = make_engine(model, drafters=[drafter])
    assert generate(engine, prompt, max_tokens=40) == [expected]
    assert Broken.passes == 4, "it was asked again"


@pytest.mark.parametrize("size", [300, 336])
def test_heads_of_different_width_have_the_same_tokens(model, tiny_checkpoint, size):
    """A token that the narrower one does not know ends its guesses for this sequence, and nothing else."""
    padded = load_model(tiny_checkpoint("llama", num_hidden_layers=1, vocab_size=size, seed=9), dtype=torch.float64)
    prompt = random_prompt(1, 20, vocab_size=300)
    drafter = draft_model(padded, model)
    engine = make_engine(model, drafters=[drafter])
    for seed in range(4):
        sampling = {"temperature": 1.0, "seed": seed, "logit_bias": {310: 2.0}, "max_tokens": 30}
        (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, **sampling)
        assert generate(engine, prompt, **sampling) == [expected]
    assert engine.stats().drafted_tokens_total > 0
    assert [one.name for one in engine.stats().drafters] == ["model"]
    assert_empty(drafter)


@pytest.mark.parametrize(("seconds", "pays"), [(0.9, True), (6.0, False)])
def test_drafting_goes_on_as_long_as_it_pays(seconds, pays):
    """Steps with drafts give four tokens in so many seconds, steps without one token in one second."""
    worth, drafted = Worth(), 0
    for _ in range(1000):
        if worth.wants():
            drafted += 1
            worth.stepped(seconds, 4, drafted=True)
        else:
            worth.stepped(1.0, 1, drafted=False)
    assert drafted > 950 if pays else drafted < 60


def test_what_did_not_pay_is_tried_again():
    worth, seconds, drafted = Worth(), 9.0, []
    for step in range(2000):
        if step == 600:
            seconds = 0.5
        wants = worth.wants()
        drafted.append(wants)
        worth.stepped(seconds if wants else 1.0, 4 if wants else 1, drafted=wants)
    assert sum(drafted[:600]) < 50
    assert sum(drafted[-500:]) > 400


def test_an_engine_stops_asking_a_model_that_does_not_pay(model):
    """The draft model is as large as the model and never right: the engine's own clock says so."""
    wrong = load_model_like(model)
    drafter = draft_model(wrong, model, worth=Worth)
    engine = make_engine(model, drafters=[drafter])
    generate(engine, random_prompt(1, 20), max_tokens=200)
    (ours,) = engine.stats().drafters
    assert ours.drafts_total < 60


def load_model_like(model):
    """The same model whose head says the opposite."""
    from types import SimpleNamespace

    class Opposite:
        spec, dtype, device = model.decoder.spec, model.decoder.dtype, model.decoder.device

        def forward(self, *given):
            return model.decoder.forward(*given)

        def logits(self, hidden):
            return -model.decoder.logits(hidden)

    return SimpleNamespace(decoder=Opposite(), spec=model.spec)


@pytest.mark.slow
def test_the_embedded_model_drafts_for_itself(smollm2_dir):
    """Greedy in float32, three chats at once in a pool that preempts: the tokens of one that guesses nothing, and few guesses
    that do not come true (a pass of several rows sums in another order)."""
    smollm2 = load_model(smollm2_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    chats = ("What is the capital of France?", "List three prime numbers.", "Write a haiku about the sea.")
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in chats]
    settings = {"block_size": 16, "max_model_len": 256}
    drafter = draft_model(smollm2, smollm2, num_blocks=32, block_size=16)
    plain = make_engine(smollm2, num_blocks=64, max_draft_tokens=0, **settings)
    engine = make_engine(smollm2, num_blocks=10, drafters=[drafter], **settings)
    tokens = []
    for one in (plain, engine):
        driver = Driver(one)
        for number, prompt in enumerate(prompts):
            driver.add(str(number), prompt, max_tokens=24)
        tokens.append([driver.run()[str(number)].tokens[0] for number in range(3)])
    assert tokens[0] == tokens[1]
    (ours,) = engine.stats().drafters
    assert ours.drafted_tokens_total > 15
    assert ours.accepted_tokens_total > 0.95 * ours.drafted_tokens_total
    assert_empty(drafter)
