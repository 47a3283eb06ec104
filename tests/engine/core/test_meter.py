import pytest

from engine.meter import HALF_LIFE_SECONDS, Meter, Rate


def test_a_rate_is_tokens_by_seconds():
    rate = Rate()
    assert rate.value == 0
    rate.add(100, 0.5)
    rate.add(100, 0.5)
    assert rate.value == pytest.approx(200, rel=0.01)


def test_old_work_counts_half_after_the_half_life():
    rate = Rate()
    rate.add(1000, 1.0)
    rate.add(0, HALF_LIFE_SECONDS)
    assert rate._tokens == pytest.approx(500)


def test_mixed_steps_charge_decode_what_it_takes_alone():
    meter = Meter()
    meter.step(0, 10, 0.1)
    meter.step(400, 10, 0.5)
    assert meter.decode.value == pytest.approx(100)
    assert meter.prefill.value == pytest.approx(1000)


def test_mixed_steps_before_decode_was_seen_alone():
    meter = Meter()
    meter.step(30, 10, 0.4)
    assert meter.decode.value == pytest.approx(100)
    assert meter.prefill.value == pytest.approx(100)
