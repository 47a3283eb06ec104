"""A generation that another engine began goes on here as it would have gone there: same tokens, same end, counted once."""

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from engine_harness import EOS, SCHEMA, Driver, make_engine, random_prompt, wire
from hypothesis import given, settings
from tokenizers import Tokenizer

from engine.core import RequestRefused
from engine.models.registry import load_model
from engine.simulate import SimulatedEngine
from engine.simulation.clock import VirtualClock
from engine.simulation.config import SimulationConfig
from gateway.workers.protocol import ResumedChoice
from grammar.compiler import GrammarCompiler
from grammar.detokenizer import Detokenizer
from prefix_cache.hashing import pack_tokens


@pytest.fixture(scope="module")
def parts(tiny_checkpoint):
    """What engines are made of: float64, so that no near tie turns with the shape of a batch; a tokenizer and a compiler."""
    directory = tiny_checkpoint("llama")
    model = load_model(directory, dtype=torch.float64)
    compiler = GrammarCompiler(directory / "tokenizer.json", model.spec.vocab_size, (EOS,))
    detokenizer = Detokenizer(Tokenizer.from_file(str(directory / "tokenizer.json")))
    yield lambda **settings: make_engine(model, grammars=compiler, detokenizer=detokenizer, **settings)
    compiler.close()


def simulated(**settings):
    config = {"num_blocks": 64, "block_size": 4, "max_model_len": 256, "vocab_size": 320, "token_ids": tuple(range(3, 300))}
    config |= {"eos_token_ids": (EOS,), "mean_output_tokens": 12, "accept_grammars": True, "max_num_seqs": 8} | settings
    return SimulatedEngine(SimulationConfig(**config), clock=VirtualClock())


def begun(seen, request):
    """The request as another engine would be asked to go on with what was seen of it."""
    choices = []
    for index in range(request.sampling.n):
        ids = b"" if index in seen.finished else pack_tokens(seen.tokens[index])
        choices.append(ResumedChoice(packed_token_ids=ids, finished=index in seen.finished))
    return msgspec.structs.replace(request, resume=tuple(choices))


def run(driver, request, steps=10_000):
    driver.engine.add(driver.engine.prepare(request))
    for _ in range(steps):
        if not driver.engine.has_work() or driver.seen[request.request_id].done is not None:
            break
        driver.step()
    return driver.seen[request.request_id]


def joined(parts, n):
    """The tokens of each choice and why it ended, over all engines that had a part in it."""
    tokens = [[token for part in parts for token in part.tokens[index]] for index in range(n)]
    ends = {index: end for part in parts for index, end in part.finished.items()}
    assert sum(len(part.finished) for part in parts) == n, "a choice ended twice"
    return tokens, {index: (end.finish_reason, end.stop_reason) for index, end in ends.items()}


asks = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 20),
        "n": st.sampled_from([1, 1, 2, 3]),
        "max_tokens": st.integers(6, 40),
        "temperature": st.sampled_from([0.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "stop": st.sampled_from([(), ("e", "a\u0000"), ("th", "zz", "\ufffd")]),
        "logprobs": st.sampled_from([None, 2]),
        "grammar": st.sampled_from([None, None, SCHEMA]),
        "caching": st.booleans(),
        "cuts": st.lists(st.integers(1, 9), min_size=1, max_size=3),
    }
)


def test_whatever_the_request_and_wherever_it_is_cut(parts):
    cuts = 0

    @settings(max_examples=70, deadline=None, derandomize=True)
    @given(ask=asks)
    def check(ask):
        nonlocal cuts
        ask = dict(ask)
        prompt = random_prompt(ask["prompt"], ask.pop("prompt"))
        positions, caching, n = ask.pop("cuts"), ask.pop("caching"), ask["n"]
        ask["min_tokens"] = min(ask["min_tokens"], ask["max_tokens"])
        request = wire("r", prompt, ignore_eos=False, seed=11, **ask)
        whole = run(Driver(parts(prefix_caching=caching)), request)
        assert whole.failed is None
        seen, now = [], request
        for steps in positions:
            driver = Driver(parts(prefix_caching=caching, num_blocks=64))
            seen.append(run(driver, now, steps))
            driver.engine.abort("r")
            driver.assert_idle()
            if seen[-1].done is not None:
                break
            state = type(whole)()
            for part in seen:
                for index, ids in part.tokens.items():
                    state.tokens[index] += ids
                state.finished.update(part.finished)
            now = begun(state, request)
            cuts += 1
        else:
            driver = Driver(parts(prefix_caching=caching))
            seen.append(run(driver, now))
            driver.assert_idle()
        assert seen[-1].failed is None
        assert joined(seen, n) == joined([whole], n)
        assert seen[-1].done.completion_tokens == sum(map(len, seen[-1].tokens.values()))
        assert seen[-1].started.prompt_tokens == len(prompt)
        assert seen[-1].done.cached_tokens <= len(prompt)
        for index in range(n):
            logprobs = [logprob for part in seen for logprob in part.logprobs[index]]
            assert [p.token_id for p in logprobs] == [p.token_id for p in whole.logprobs[index]]
            assert [p.logprob for p in logprobs] == pytest.approx([p.logprob for p in whole.logprobs[index]], abs=1e-9)

    check()
    assert cuts > 60, f"hardly any request was cut: {cuts}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(n=st.integers(1, 3), temperature=st.sampled_from([0.0, 1.0]), cut=st.integers(1, 30), length=st.integers(1, 30))
def test_simulated_replicas_too(n, temperature, cut, length):
    request = wire("r", range(3, 3 + length), n=n, temperature=temperature, seed=5, max_tokens=24, ignore_eos=False)
    whole = run(Driver(simulated()), request)
    first = Driver(simulated())
    seen = [run(first, request, cut)]
    first.engine.abort("r")
    first.assert_idle()
    if seen[0].done is None:
        second = Driver(simulated())
        seen.append(run(second, begun(seen[0], request)))
        second.assert_idle()
        assert seen[1].done.completion_tokens == sum(map(len, seen[1].tokens.values()))
    assert joined(seen, n) == joined([whole], n)


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_nothing_left_to_generate_is_said_at_once(parts, kind):
    def new():
        return parts() if kind == "real" else simulated(mean_output_tokens=0)

    request = wire("r", [5, 6, 7], n=2, max_tokens=4)
    whole = run(Driver(new()), request)
    resume = (ResumedChoice(finished=True), ResumedChoice(packed_token_ids=pack_tokens(whole.tokens[1])))
    driver = Driver(new())
    again = run(driver, msgspec.structs.replace(request, resume=resume))
    assert not any(again.tokens.values())
    assert {index: end.finish_reason for index, end in again.finished.items()} == {1: "length"}
    assert (again.started.prompt_tokens, again.done.completion_tokens) == (3, 0)
    driver.assert_idle()
    # Aborted before the step that would have said it.
    driver = Driver(new())
    driver.engine.add(driver.engine.prepare(msgspec.structs.replace(request, resume=resume)))
    assert driver.engine.abort("r")
    assert driver.engine.step() == []
    driver.assert_idle()


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_the_choices_that_go_on_find_the_prompt_that_the_first_computed(parts, kind):
    settings = {"max_num_batched_tokens": 64}
    engine = parts(**settings) if kind == "real" else simulated(mean_output_tokens=0, **settings)
    driver = Driver(engine)
    request = wire("r", random_prompt(3, 101), n=3, max_tokens=9, temperature=1.0, seed=1)
    first = Driver(parts() if kind == "real" else simulated(mean_output_tokens=0))
    run(first, request, 5)
    given = sum(map(len, first.seen["r"].tokens.values()))
    run(driver, begun(first.seen["r"], request))
    # Two steps for the prompt and one for what the other choices have beyond it, which gives them their next token; were the
    # prompt computed three times, it would take five.
    assert engine.stats().steps_total == 2 + 9 - given // 3
    driver.assert_idle()


@pytest.mark.parametrize("kind", ["real", "simulated"])
@pytest.mark.parametrize(
    ("change", "code", "field", "words"),
    [
        ({"resume": (ResumedChoice(),) * 2}, "invalid_resume", "resume", ("2 entries", "n is 1")),
        ({"resume": (ResumedChoice(packed_token_ids=b"abc"),)}, "invalid_resume", "resume[0].packed_token_ids", ("cut off",)),
        (
            {"resume": (ResumedChoice(packed_token_ids=pack_tokens([5, 320])),)},
            "invalid_token",
            "resume[0].packed_token_ids",
            ("320 at index 1", "0 to 319"),
        ),
        (
            {"resume": (ResumedChoice(packed_token_ids=pack_tokens([5, 6, 7, 8, 9])),), "max_tokens": 4},
            "invalid_resume",
            "resume[0].packed_token_ids",
            ("ended with its token 3 (length)", "5 are given"),
        ),
        ({"resume": (ResumedChoice(),), "temperature": 1.0}, "invalid_resume", "sampling.seed", ("give the seed",)),
    ],
)
def test_what_does_not_fit_is_refused(parts, kind, change, code, field, words):
    engine = parts() if kind == "real" else simulated()
    change = dict(change)
    resume = change.pop("resume")
    request = msgspec.structs.replace(wire("r", [5, 6], **change), resume=resume)
    with pytest.raises(RequestRefused) as caught:
        engine.add(engine.prepare(request))
    assert (caught.value.code, caught.value.field) == (code, field)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not engine.has_work()


def test_tokens_that_the_grammar_forbids_are_refused(parts):
    request = msgspec.structs.replace(
        wire("r", [5, 6], grammar=SCHEMA, ignore_eos=False, max_tokens=30),
        resume=(ResumedChoice(packed_token_ids=pack_tokens([EOS, 5])),),
    )
    with pytest.raises(RequestRefused, match="grammar does not allow token 2, number 0 of choice 0") as caught:
        parts().prepare(request)
    assert caught.value.code == "invalid_resume"
