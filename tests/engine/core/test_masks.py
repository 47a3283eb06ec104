"""Masks that are made beside the forward pass are those that would have been made before it."""

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from engine_harness import EOS, SCHEMA, Driver, make_engine, random_prompt
from hypothesis import given, settings

from engine import masks as masks_module
from engine.choosing_rows import Choosing
from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.masks import StepMasks
from engine.models.registry import load_model
from engine.speculation.drafts import Draft
from grammar.compiler import GrammarCompiler, allocate_bitmask, only_tokens


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float64)


@pytest.fixture(scope="module")
def compiler(checkpoint, model):
    made = GrammarCompiler(checkpoint / "tokenizer.json", model.spec.vocab_size, (EOS,))
    yield made
    made.close()


def allowed(mask, vocab_size):
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits).tolist()


@given(rows=st.lists(st.sets(st.integers(0, 99), max_size=4), min_size=1, max_size=6))
def test_the_only_token_of_a_row(rows):
    bitmask = allocate_bitmask(len(rows), 100).zero_()
    for row, tokens in enumerate(rows):
        for token in tokens:
            bitmask.numpy().view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)
    assert only_tokens(bitmask) == [next(iter(tokens)) if len(tokens) == 1 else None for tokens in rows]


def standing(compiled, tokens):
    """A sequence whose grammar has taken these."""
    matcher = compiled.matcher()
    for token in tokens:
        assert matcher.accept(token)
    return SimpleNamespace(matcher=matcher, next_mask=None, slow_mask=False, broken=None)


def walk(compiled, choices, vocab_size):
    """Tokens that the grammar allows, one for each of `choices`."""
    matcher, tokens = compiled.matcher(), []
    for choice in choices:
        mask = allocate_bitmask(1, vocab_size)
        matcher.fill_bitmask(mask, 0)
        options = [token for token in allowed(mask[0], vocab_size) if token != EOS]
        if not options:
            break
        tokens.append(options[choice % len(options)])
        assert matcher.accept(tokens[-1])
    return tokens


@settings(deadline=None, max_examples=60)
@given(
    walks=st.lists(
        st.tuples(
            st.lists(st.integers(0, 400), max_size=25), st.integers(0, 6), st.sampled_from(["plain", "slow", "known", "free"])
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_hold_what_the_grammar_allows_there(compiler, model, walks):
    """Behind known tokens and behind every guess, whoever makes it and when; matchers stay where they were."""
    vocab_size, compiled = model.spec.vocab_size, compiler.compile(SCHEMA)
    wanted, expected, at = [], [], 0
    for choices, guesses, kind in walks:
        tokens = walk(compiled, choices, vocab_size)
        known, guessed = tokens[: max(len(tokens) - guesses, 0)], tokens[max(len(tokens) - guesses, 0) :]
        sequence = standing(compiled, known)
        if kind == "free":
            sequence.matcher = None
        for count in range(len(guessed) + 1):
            mask = allocate_bitmask(1, vocab_size)
            if sequence.matcher is not None:
                standing(compiled, tokens[: len(known) + count]).matcher.fill_bitmask(mask, 0)
            expected.append(allowed(mask[0], vocab_size))
        sequence.slow_mask = kind == "slow"
        if kind == "known":
            sequence.next_mask = allocate_bitmask(1, vocab_size)[0]
            sequence.matcher.fill_bitmask(sequence.next_mask.unsqueeze(0), 0)
        rows = range(at, at + len(guessed) + 1)
        at = rows.stop
        wanted.append(Choosing(sequence, rows, Draft(tuple(guessed)) if guessed else None))
    masks = StepMasks(vocab_size)
    for _ in range(2):  # a second time from where they stand: nothing has moved
        masks.begin(wanted)
        filled = masks.take()
        assert not filled.broken
        if all(one.sequence.matcher is None for one in wanted):
            assert filled.bitmask is None
        else:
            assert [allowed(row, vocab_size) for row in filled.bitmask] == expected
    assert masks.take().bitmask is None
    masks.close()


def test_what_the_grammar_refuses_breaks_its_sequence_only(compiler, model):
    compiled, size = compiler.compile(SCHEMA), model.spec.vocab_size
    good, bad, gone = (standing(compiled, ()) for _ in range(3))
    first = walk(compiled, [0], size)
    gone.broken = ValueError("the grammar is gone")
    masks = StepMasks(size)
    draft = Draft((EOS,))
    masks.begin([Choosing(good, range(1)), Choosing(bad, range(1, 3), draft), Choosing(gone, range(3, 4))])
    filled = masks.take()
    assert {index: str(error) for index, error in filled.broken.items()} == {
        1: f"token {EOS} was guessed against the grammar; this is a bug",
        2: "the grammar is gone",
    }
    assert first[0] in allowed(filled.bitmask[0], size)
    assert bad.matcher.accept(first[0]), "the matcher was not taken back"
    masks.close()


def test_masks_that_take_long_are_made_beside_the_pass(compiler, model, monkeypatch):
    """Who takes long is not waited for any more, and comes back when it is quick again."""
    compiled, size = compiler.compile(SCHEMA), model.spec.vocab_size
    one, other = standing(compiled, ()), standing(compiled, ())
    masks = StepMasks(size)
    monkeypatch.setattr(masks_module, "SLOW_SECONDS", -1.0)
    masks.ahead([one, other])
    assert one.slow_mask
    assert other.slow_mask
    one.next_mask = other.next_mask = None
    assert masks.ahead([one, other]) == [None, None]
    assert one.next_mask is None, "it was made although it takes long"
    monkeypatch.setattr(masks_module, "SLOW_SECONDS", 3600.0)
    before = masks.seconds_beside
    masks.begin([Choosing(one, range(1)), Choosing(other, range(1, 2))])
    assert masks.take().bitmask is not None
    assert masks.seconds_beside > before
    assert not one.slow_mask
    masks.ahead([one, other])
    assert one.next_mask is not None
    masks.close()


def test_guesses_are_masked_while_the_pass_runs(compiler, model):
    """The pass waits until the thread beside it has made its masks: were they made before or after, it would wait for ever."""
    seen = []

    class Waiting(LayeredForward):
        def run(self, batch, kv, rows):
            if engine._masks._filled is None:  # they are being made
                outcome = engine._masks._thread._outcomes.get(timeout=60)
                engine._masks._thread._outcomes.put(outcome)
                seen.append(len(rows))
            return super().run(batch, kv, rows)

    engine = make_engine(model, grammars=compiler, forward=Waiting(model.decoder, ReferenceAttention()), drafters=())
    driver = Driver(engine)
    driver.add("a", random_prompt(1, 9), grammar=SCHEMA, max_tokens=30, ignore_eos=False)
    driver.run()
    assert driver.seen["a"].failed is None
    assert seen, "no step had its masks made beside it"
    engine.close()


def test_an_early_end_of_a_pass_leaves_the_matchers_alone(compiler, model):
    """What was begun for a pass that fails is waited for, so that the next step finds its matchers where they stood."""
    failing = iter([False, True])

    class Failing(LayeredForward):
        def run(self, batch, kv, rows):
            if next(failing, False):
                raise RuntimeError("out of memory")
            return super().run(batch, kv, rows)

    engine = make_engine(model, grammars=compiler, forward=Failing(model.decoder, ReferenceAttention()))
    driver = Driver(engine)
    driver.add("lost", random_prompt(1, 9), grammar=SCHEMA, max_tokens=30, ignore_eos=False)
    driver.run()
    assert driver.seen["lost"].failed.code == "engine_error"
    driver.add("next", random_prompt(1, 9), grammar=SCHEMA, max_tokens=30, ignore_eos=False)
    plain = Driver(make_engine(model, grammars=compiler, max_draft_tokens=0))
    plain.add("next", random_prompt(1, 9), grammar=SCHEMA, max_tokens=30, ignore_eos=False)
    assert driver.run()["next"].tokens == plain.run()["next"].tokens
    engine.close()
