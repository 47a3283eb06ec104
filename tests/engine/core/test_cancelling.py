"""A step that is only for requests that are about to be dropped ends early, and leaves no trace."""

import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt

from engine.cancelling import ForwardCancelledError, StepCancelling
from engine.config import EngineConfig
from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.loading import load_engine
from engine.models.registry import load_model
from gateway.workers.protocol import Started

PROMPT = random_prompt(1, 60)


class Watched(ReferenceAttention):
    """Counts layers; does something in one of them."""

    def __init__(self):
        super().__init__()
        self.layers, self.at, self.then = 0, None, None

    def attend(self, *args, **kwargs):
        if self.layers == self.at:
            self.then()
        self.layers += 1
        return super().attend(*args, **kwargs)


@pytest.fixture
def watched(tiny_checkpoint):
    model = load_model(tiny_checkpoint("llama"), dtype=torch.float64)
    kernel = Watched()
    return model, kernel, Driver(make_engine(model, forward=LayeredForward(model.decoder, kernel)))


def test_a_step_ends_with_the_layer_in_which_its_only_request_left(watched):
    model, kernel, driver = watched
    driver.add("r", PROMPT)
    kernel.at, kernel.then = 1, lambda: driver.engine.cancel("r")
    chunks = driver.step()
    assert [type(chunk) for _, chunk in chunks] == [Started]
    assert kernel.layers == 2 < model.spec.num_layers
    assert driver.engine.abort("r")
    driver.assert_idle()
    # Nothing of it is found again, and the next request is computed whole.
    assert driver.engine.snapshot()["device"] == b""
    driver.add("after", PROMPT)
    seen = driver.run()["after"]
    assert seen.started.cached_tokens == 0
    assert [seen.tokens[0]] == generate(make_engine(model), PROMPT)


def test_a_step_that_others_wait_for_is_not_thrown_away(watched):
    model, kernel, driver = watched
    driver.add("leaves", PROMPT[:30])
    driver.add("stays", PROMPT[30:])
    kernel.at, kernel.then = 1, lambda: driver.engine.cancel("leaves")
    driver.step()
    assert kernel.layers == model.spec.num_layers
    assert driver.engine.abort("leaves")
    driver.run()
    assert [driver.seen["stays"].tokens[0]] == generate(make_engine(model), PROMPT[30:])
    driver.assert_idle()


def test_an_id_that_comes_again_is_another_request(watched):
    _, _, driver = watched
    driver.add("r", PROMPT)
    driver.engine.cancel("r")
    assert driver.engine.abort("r")
    driver.engine.cancel("unknown")
    assert not driver.engine.abort("unknown")
    driver.add("r", PROMPT)
    assert driver.run()["r"].done is not None


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_whatever_computes_looks_at_the_flag(tiny_checkpoint, kernels, tmp_path):
    config = EngineConfig(
        model=tiny_checkpoint("llama"), kernels=kernels, dtype="float32", num_blocks=64, threads=1, max_model_len=256
    )
    engine = load_engine(config)
    try:
        driver = Driver(engine)
        expected = generate(engine, PROMPT)
        engine.clear_cache()
        driver.add("r", PROMPT)
        engine.cancel("r")
        for _ in range(3):
            assert not [chunk for _, chunk in driver.step() if not isinstance(chunk, Started)]
        assert engine.abort("r")
        driver.assert_idle()
        assert generate(engine, PROMPT) == expected
    finally:
        engine.close()


def test_the_flag_follows_who_is_left():
    steps = StepCancelling()
    steps.leaving("a")
    assert not steps.flag.is_set  # nothing runs
    steps.begin(["a", "b"])
    assert not steps.flag.is_set
    steps.leaving("b")
    assert steps.flag.is_set
    with pytest.raises(ForwardCancelledError):
        steps.flag.check()
    steps.end()
    assert not steps.flag.is_set
    steps.dropped("a")
    steps.begin(["a"])
    assert not steps.flag.is_set
