"""What a request meets on its way through the engine: refusals, chunks, aborts, failures, accounting."""

import numpy as np
import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt, wire

from engine.core import RequestRefused
from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.models.registry import load_model
from engine.sampling.sampler import SampledToken, Sampler
from gateway.workers.protocol import Done, Finished, GenerateRequest, Started, Tokens
from grammar.tools import GrammarRefused
from prefix_cache.block_pool import IntegrityError
from prefix_cache.events import BlocksStored
from prefix_cache.hashing import block_digests, pack_tokens, root_digest, split_digests


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("llama"), dtype=torch.float32)


def refused(engine, request):
    with pytest.raises(RequestRefused) as caught:
        engine.prepare(request)
    engine.check_integrity()
    return caught.value


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeMatcher:
    """Allows tokens in a fixed order, then token 2, and can be told to break."""

    def __init__(self, order, breaks=None):
        self.order, self.at, self.breaks = [*order, 2], 0, breaks

    def fill_bitmask(self, bitmask, row):
        if self.breaks == ("fill", self.at):
            raise RuntimeError("the matcher is broken")
        bitmask[row].zero_()
        if self.at < len(self.order):
            token = self.order[self.at]
            bitmask[row, token // 32] = np.int32(np.uint32(1 << (token % 32)).view(np.int32))

    def accept(self, token_id):
        if self.breaks == ("accept", self.at):
            return False
        assert token_id == self.order[self.at]
        self.at += 1
        return True

    def rollback(self, count):
        self.at -= count

    def forced_text(self):
        return ""

    def is_terminated(self):
        return self.at == len(self.order)


class FakeGrammars:
    """compile("5,6,7") allows just that; "bad" is refused; "5,6/fill/1" breaks on filling the mask after one token."""

    closed = False

    def compile(self, source):
        if source == "bad":
            raise GrammarRefused("The schema is bad.", pointer="/structures/0/schema")
        order, *breaks = source.split("/")
        self.last = [int(token) for token in order.split(",")], (breaks[0], int(breaks[1])) if breaks else None
        return self

    def matcher(self):
        return FakeMatcher(*self.last)

    def close(self):
        self.closed = True


class MaskedArgmax(Sampler):
    """Greedy under the bitmask, so that these tests depend on the engine alone."""

    def sample(self, logits, states, bitmask=None):
        logits = logits.clone()
        if bitmask is not None:
            bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
            logits[torch.from_numpy(bits == 0)] = float("-inf")
        return [SampledToken(token_id, -0.5, ((token_id, -0.5),)) for token_id in logits.argmax(-1).tolist()]


# Refusals


@pytest.mark.parametrize(
    ("request_", "code", "field", "numbers"),
    [
        (wire("r", []), "empty_prompt", "token_ids", ()),
        (wire("r", [5, 320]), "invalid_token", "token_ids[1]", ("320", "319")),
        (wire("r", [-1]), "invalid_token", "token_ids[0]", ("-1",)),
        (wire("r", [2**70]), "invalid_token", "token_ids", ()),
        (wire("r", [5] * 256), "context_length_exceeded", "token_ids", ("256", "255")),
        (wire("r", [5] * 90, max_tokens=40), "kv_capacity_exceeded", "sampling.max_tokens", ("33", "20")),
        (wire("r", [5] * 90, max_tokens=None), "kv_capacity_exceeded", "token_ids", ("23", "20")),
        (wire("r", [5], n=9), "invalid_sampling", "sampling.n", ("9", "8")),
        (wire("r", [5], temperature=-1.0), "invalid_sampling", "sampling.temperature", ("-1",)),
        (wire("r", [5], stop=("x",)), "unsupported", "sampling.stop", ()),
        (wire("r", [5], grammar="{}"), "unsupported_grammar", "grammar", ()),
        (GenerateRequest(request_id="r"), "invalid_request", "token_ids", ()),
        (GenerateRequest(request_id="r", token_ids=[1], packed_token_ids=b"1234"), "invalid_request", "token_ids", ()),
        (GenerateRequest(request_id="r", packed_token_ids=b"12345"), "invalid_request", "packed_token_ids", ()),
    ],
)
def test_refusals_name_field_and_numbers(model, request_, code, field, numbers):
    error = refused(make_engine(model, num_blocks=20), request_)
    assert (error.code, error.field) == (code, field)
    assert all(number in error.message for number in numbers), error.message


def test_a_grammar_that_does_not_compile(model):
    engine = make_engine(model, grammars=FakeGrammars())
    error = refused(engine, wire("r", [5], grammar="bad"))
    assert (error.code, error.field, error.message) == ("invalid_grammar", "/structures/0/schema", "The schema is bad.")


def test_a_request_id_in_use(model):
    engine = make_engine(model)
    engine.add(engine.prepare(wire("r", [5])))
    second = engine.prepare(wire("r", [6]))
    with pytest.raises(RequestRefused, match="an id of its own") as caught:
        engine.add(second)
    assert caught.value.code == "duplicate_request_id"
    engine.abort("r")
    engine.add(second)


def test_what_just_fits_is_served(model):
    engine = make_engine(model, num_blocks=20)
    # 80 tokens of KV; the token generated last needs none.
    assert len(generate(engine, random_prompt(1, 60), max_tokens=21)[0]) == 21
    assert refused(engine, wire("r", random_prompt(1, 60), max_tokens=22)).code == "kv_capacity_exceeded"
    assert len(generate(engine, random_prompt(1, 80), max_tokens=None)[0]) == 1
    long = make_engine(model, num_blocks=256)
    assert len(generate(long, random_prompt(1, 255), max_tokens=50)[0]) == 1
    assert len(generate(long, random_prompt(1, 200), max_tokens=None)[0]) == 56


# Chunks


def test_the_order_of_chunks(model):
    driver = Driver(make_engine(model, max_num_batched_tokens=8))
    driver.add("r", random_prompt(3, 20), max_tokens=3)
    assert driver.step() == [("r", Started(20, 0, driver.seen["r"].started.queue_seconds))]
    assert driver.step() == []
    steps = [driver.step() for _ in range(3)]
    kinds = [[type(chunk) for _, chunk in chunks] for chunks in steps]
    assert kinds == [[Tokens], [Tokens], [Tokens, Finished, Done]]
    assert steps[2][1][1] == Finished("length")
    assert not driver.engine.has_work()
    assert driver.engine.step() == []


def test_times_of_a_request(model):
    clock = Clock()
    engine = make_engine(model, max_num_batched_tokens=8, clock=clock)
    driver = Driver(engine)
    driver.add("r", random_prompt(3, 20), max_tokens=3)
    clock.now += 2
    driver.step()
    assert driver.seen["r"].started.queue_seconds == 2
    clock.now += 3
    driver.step()
    clock.now += 1
    driver.step()
    clock.now += 5
    driver.run()
    done = driver.seen["r"].done
    assert (done.queue_seconds, done.prefill_seconds, done.decode_seconds) == (2, 4, 5)
    assert (done.prompt_tokens, done.completion_tokens, done.preemptions) == (20, 3, 0)


def test_a_seed_is_drawn_once_for_all_choices(model):
    engine = make_engine(model)
    first, second = (engine.prepare(wire("r", [5], n=2)) for _ in range(2))
    seeds = [[sequence.sampling.seed for sequence in request.sequences] for request in (first, second)]
    assert seeds[0][0] == seeds[0][1] != seeds[1][0]
    fixed = engine.prepare(wire("r", [5], n=2, seed=11))
    assert [sequence.sampling.seed for sequence in fixed.sequences] == [11, 11]


def test_packed_prompts_are_the_same_prompts(model):
    engine = make_engine(model)
    prompt = random_prompt(1, 9)
    packed = engine.prepare(GenerateRequest(request_id="r", packed_token_ids=pack_tokens(prompt)))
    listed = engine.prepare(GenerateRequest(request_id="r", token_ids=prompt))
    assert packed.prompt.tolist() == listed.prompt.tolist() == prompt
    assert packed.sequences[0].digests == listed.sequences[0].digests


def test_logprobs_come_with_their_tokens_and_only_when_asked_for(model):
    driver = Driver(make_engine(model, sampler=MaskedArgmax(320)))
    driver.add("with", random_prompt(1, 5), logprobs=1, max_tokens=3)
    driver.add("without", random_prompt(1, 5), max_tokens=3)
    driver.run()
    entries = driver.seen["with"].logprobs[0]
    assert [entry.token_id for entry in entries] == driver.seen["with"].tokens[0]
    assert all(entry.top == ((entry.token_id, -0.5),) for entry in entries)
    assert driver.seen["without"].logprobs[0] == []


def test_eos_ends_one_choice_and_not_the_others(model):
    class EosForChoiceOne(Sampler):
        def sample(self, logits, states, bitmask=None):
            return [SampledToken(2 if state.choice == 1 and state.generated == 1 else 7) for state in states]

    driver = Driver(make_engine(model, sampler=EosForChoiceOne(320)))
    driver.add("r", random_prompt(1, 6), n=3, max_tokens=4, ignore_eos=False)
    seen = driver.run()["r"]
    assert {choice: len(tokens) for choice, tokens in seen.tokens.items()} == {0: 4, 1: 2, 2: 4}
    assert {choice: end.finish_reason for choice, end in seen.finished.items()} == {0: "length", 1: "stop", 2: "length"}
    assert seen.done.completion_tokens == 10


def test_choices_that_end_with_their_first_token(model):
    class AllEos(Sampler):
        def sample(self, logits, states, bitmask=None):
            return [SampledToken(2) for _ in states]

    driver = Driver(make_engine(model, sampler=AllEos(320)))
    driver.add("r", random_prompt(1, 6), n=3, max_tokens=4, ignore_eos=False)
    seen = driver.run()["r"]
    assert {choice: list(tokens) for choice, tokens in seen.tokens.items()} == {0: [2], 1: [2], 2: [2]}
    assert seen.done.completion_tokens == 3


# Aborts


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_after_any_step_gives_all_blocks_back(model, steps, n):
    driver = Driver(make_engine(model, num_blocks=24, max_num_batched_tokens=16))
    driver.add("a", random_prompt(1, 30), n=n, max_tokens=12)
    driver.add("b", random_prompt(2, 30), n=n, max_tokens=12)
    for _ in range(steps):
        driver.step()
    for name in ("a", "b"):
        assert driver.engine.abort(name)
        assert not driver.engine.abort(name)
        driver.engine.check_integrity()
    assert not driver.engine.has_work()
    driver.assert_idle()
    assert driver.engine.stats().aborted_total == 2


def test_aborting_a_preempted_request(model):
    driver = Driver(make_engine(model, num_blocks=12))
    driver.add("a", random_prompt(1, 14), max_tokens=20)
    driver.add("b", random_prompt(2, 14), max_tokens=20)
    while not driver.engine.stats().preemptions_total:
        driver.step()
    assert driver.engine.stats().waiting == 1
    assert driver.engine.abort("b")
    driver.run()
    assert driver.seen["a"].done.completion_tokens == 20


def test_aborting_an_unknown_request(model):
    assert make_engine(model).abort("nobody") is False


# Failures


class BreakingForward(LayeredForward):
    """Raises in the steps that hold a token of the given value."""

    def __init__(self, model, token):
        super().__init__(model.decoder, ReferenceAttention())
        self.token = token

    def run(self, batch, kv, rows):
        if self.token in batch.token_ids.tolist():
            raise RuntimeError("out of memory")
        return super().run(batch, kv, rows)


def test_a_step_that_raises_fails_its_requests_and_the_engine_lives(model):
    driver = Driver(make_engine(model, forward=BreakingForward(model, 319), max_num_seqs=2))
    good, bad = random_prompt(1, 10, 300), [*random_prompt(2, 10, 300), 319]
    driver.add("first", bad, n=2)
    driver.add("second", good)
    driver.run()
    assert driver.seen["first"].failed.code == "engine_error"
    assert "out of memory" in driver.seen["first"].failed.message
    assert driver.seen["second"].done.completion_tokens == 8
    assert generate(driver.engine, good) == [driver.seen["second"].tokens[0]]


def test_all_sequences_of_a_failed_step_fail_and_what_waits_goes_on(model):
    driver = Driver(make_engine(model, forward=BreakingForward(model, 319), max_num_seqs=2))
    driver.add("a", random_prompt(1, 10, 300))
    driver.add("b", [319])
    driver.add("c", random_prompt(3, 10, 300))
    driver.run()
    assert driver.seen["a"].failed.code == driver.seen["b"].failed.code == "engine_error"
    assert driver.seen["c"].failed is None
    assert driver.seen["c"].done.completion_tokens == 8


def test_wrong_books_are_not_survived(model):
    driver = Driver(make_engine(model))
    driver.add("a", random_prompt(1, 10))
    driver.step()

    def publish(*_):
        raise IntegrityError("broken")

    driver.engine._cache.pool.publish = publish
    driver.step()  # tokens 11 of 4-token blocks: nothing fills
    with pytest.raises(IntegrityError, match="broken"):
        driver.engine.step()


def test_a_row_that_cannot_be_sampled_fails_its_request_only(model):
    class NoToken(Sampler):
        def sample(self, logits, states, bitmask=None):
            return [
                SampledToken(-1, error="No token is left.")
                if state.params.seed == 13 and state.generated == 2
                else SampledToken(7)
                for state in states
            ]

    driver = Driver(make_engine(model, sampler=NoToken(320)))
    driver.add("bad", random_prompt(1, 10), seed=13, n=2)
    driver.add("good", random_prompt(2, 10), seed=14)
    driver.run()
    assert (driver.seen["bad"].failed.code, driver.seen["bad"].failed.message) == ("sampling_error", "No token is left.")
    assert driver.seen["good"].done.completion_tokens == 8


# Grammars


def grammar_driver(model):
    return Driver(make_engine(model, sampler=MaskedArgmax(320), grammars=FakeGrammars()))


def test_grammars_constrain_each_choice_beside_free_requests(model):
    driver = grammar_driver(model)
    driver.add("g", random_prompt(1, 10), grammar="31,32,300", n=2, ignore_eos=False)
    driver.add("free", random_prompt(1, 10))
    driver.run()
    assert driver.seen["g"].tokens == {0: [31, 32, 300, 2], 1: [31, 32, 300, 2]}
    assert {end.finish_reason for end in driver.seen["g"].finished.values()} == {"stop"}
    assert [driver.seen["free"].tokens[0]] == generate(make_engine(model), random_prompt(1, 10))


def test_a_terminated_grammar_ends_the_generation_even_when_eos_is_ignored(model):
    driver = grammar_driver(model)
    driver.add("g", random_prompt(1, 10), grammar="5", max_tokens=20)
    seen = driver.run()["g"]
    assert seen.tokens[0] == [5, 2]
    assert seen.finished[0] == Finished("stop")


def test_grammar_state_survives_preemption(model):
    engine = make_engine(model, num_blocks=8, sampler=MaskedArgmax(320), grammars=FakeGrammars())
    driver = Driver(engine)
    order = list(range(40, 56))
    for name in ("a", "b"):
        # Asked for log-probabilities, it takes a pass for every token, also where the grammar leaves no choice.
        grammar = ",".join(map(str, order))
        driver.add(name, random_prompt(ord(name), 9), grammar=grammar, max_tokens=20, ignore_eos=False, logprobs=0)
    driver.run()
    assert engine.stats().preemptions_total > 0
    assert driver.seen["a"].tokens[0] == driver.seen["b"].tokens[0] == [*order, 2]


@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_broken_grammar_fails_its_request_only(model, where, at):
    driver = grammar_driver(model)
    driver.add("before", random_prompt(1, 10))
    driver.add("bad", random_prompt(2, 10), grammar=f"5,6,7/{where}/{at}", n=2, ignore_eos=False)
    driver.add("after", random_prompt(3, 10), grammar="8,9", ignore_eos=False)
    driver.run()
    assert driver.seen["bad"].failed.code == "grammar_error"
    assert driver.seen["bad"].tokens[0] == [5][:at]
    assert [driver.seen["before"].tokens[0]] == generate(make_engine(model), random_prompt(1, 10))
    assert driver.seen["after"].tokens[0] == [8, 9, 2]


def test_close_ends_the_compiler(model):
    engine = make_engine(model, grammars=(grammars := FakeGrammars()))
    engine.close()
    assert grammars.closed
    make_engine(model).close()


# Accounting


def test_info(model):
    engine = make_engine(model, num_blocks=40, model_name="tiny-llama")
    info = engine.info
    assert (info.model, info.block_size, info.num_blocks, info.max_model_len) == ("tiny-llama", 4, 40, 256)
    assert (info.vocab_size, info.max_concurrency, info.simulated) == (320, 8, False)
    assert info.capabilities.kv_events
    assert not info.capabilities.grammars
    assert not make_engine(model, prefix_caching=False).info.capabilities.kv_events


def test_the_namespace_is_of_what_shapes_kv(model, tiny_checkpoint):
    namespace = make_engine(model).info.namespace
    other = make_engine(model, num_blocks=9, max_num_seqs=3, model_name="x")
    assert other.info.namespace == namespace
    assert other.info.instance != make_engine(model).info.instance
    others = {
        make_engine(model, block_size=8).info.namespace,
        make_engine(load_model(tiny_checkpoint("llama"), dtype=torch.float64)).info.namespace,
        make_engine(load_model(tiny_checkpoint("llama", seed=1), dtype=torch.float32)).info.namespace,
        make_engine(load_model(tiny_checkpoint("llama", rope_theta=5000.0), dtype=torch.float32)).info.namespace,
    }
    assert len(others | {namespace}) == 5


def test_stats_and_totals(model):
    driver = Driver(make_engine(model, max_num_seqs=1, max_num_batched_tokens=16))
    driver.add("a", random_prompt(1, 20), max_tokens=4)
    driver.add("b", random_prompt(1, 20), max_tokens=4)
    driver.step()
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_prompt_tokens) == (1, 1, 20)
    assert stats.free_blocks + stats.cached_blocks == 256 - 4
    driver.run()
    stats = driver.engine.stats()
    assert (stats.requests_total, stats.prompt_tokens_total, stats.cached_tokens_total) == (2, 40, 16)
    assert stats.generated_tokens_total == 8
    assert stats.steps_total == 2 + 3 + 1 + 3
    assert stats.prefill_tokens_per_second > 0
    assert stats.decode_tokens_per_second > 0


def test_events_name_prompt_and_generated_blocks_in_the_namespace(model):
    engine = make_engine(model)
    prompt = random_prompt(1, 10)
    (tokens,) = generate(engine, prompt, max_tokens=8, cache_salt="s")
    root = root_digest(bytes.fromhex(engine.info.namespace), "s")
    expected = block_digests(prompt + tokens[:7], root, 4)  # the last token has no KV
    stored = engine.take_events()
    assert all(isinstance(event, BlocksStored) for event in stored)
    assert [digest for event in stored for digest in split_digests(event.digests)] == expected
    assert stored[0].parent == root
    assert stored[1].parent == expected[1]
    assert sorted(split_digests(engine.snapshot()["device"])) == sorted(expected)
    assert engine.take_events() == []


def test_a_cleared_cache_is_empty_and_running_requests_go_on(model):
    engine = make_engine(model)
    prompt = random_prompt(1, 30)
    (expected,) = generate(engine, prompt)
    driver = Driver(engine)
    driver.add("a", prompt)
    driver.step()
    engine.clear_cache()
    assert engine.snapshot() == {"device": b""}
    seen = driver.run()["a"]
    assert seen.tokens[0] == expected
    assert seen.done.cached_tokens == 28
