import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.metrics import DURATION_BUCKETS, FIRST_TOKEN_BUCKETS, PER_TOKEN_BUCKETS
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Receipt, SessionRef, Turn, TurnError
from gateway.workers.views import WorkerView


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def turn(model="m", session="s"):
    return Turn("r", model, SessionRef("t", session), ())


def samples(telemetry):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(telemetry.render_metrics().decode())
        for sample in family.samples
    }


def value(telemetry, name, **labels):
    return samples(telemetry).get((f"turnkeep_gateway_{name}", *sorted(labels.items())))


def test_what_a_turn_leaves_behind():
    clock = Clock()
    telemetry = Telemetry(clock=clock)
    span = telemetry.start_turn("chat", turn(), {})
    assert value(telemetry, "turns_in_flight") == 1
    span.dispatched(Receipt("replica-0", "home", 64, 2))
    span.dispatched(Receipt("replica-1", "load", 16, 2))
    clock.now += 0.3
    span.first_token()
    clock.now += 2.0
    span.finished(
        response_id="r", response_model="m", finish_reasons=["stop"], prompt_tokens=200, cached_tokens=64, completion_tokens=21
    )
    span.finished(
        response_id="r", response_model="m", finish_reasons=[], prompt_tokens=200, cached_tokens=64, completion_tokens=21
    )
    labels = {"operation": "chat", "model": "m"}
    assert value(telemetry, "turns_in_flight") == 0
    assert value(telemetry, "turns_total", status="200", **labels) == 1
    assert value(telemetry, "prompt_tokens_total", model="m") == 200
    assert value(telemetry, "cached_tokens_total", model="m") == 64
    assert value(telemetry, "promised_tokens_total", model="m") == 80
    assert value(telemetry, "completion_tokens_total", model="m") == 21
    assert value(telemetry, "routes_total", reason="home") == 1
    assert value(telemetry, "routes_total", reason="load") == 1
    assert value(telemetry, "request_duration_seconds_sum", **labels) == pytest.approx(2.3)
    assert value(telemetry, "time_to_first_token_seconds_bucket", le="0.25", **labels) == 0
    assert value(telemetry, "time_to_first_token_seconds_bucket", le="0.5", **labels) == 1
    assert value(telemetry, "time_per_output_token_seconds_bucket", le="0.075", **labels) == 0
    assert value(telemetry, "time_per_output_token_seconds_bucket", le="0.15", **labels) == 1


def test_the_buckets_are_those_of_the_conventions():
    assert len(DURATION_BUCKETS) == 14
    assert (DURATION_BUCKETS[0], round(DURATION_BUCKETS[-1], 2)) == (0.01, 81.92)
    assert len(FIRST_TOKEN_BUCKETS) == 16
    assert len(PER_TOKEN_BUCKETS) == 13


def test_failures_count_by_status_and_no_token_is_counted():
    telemetry = Telemetry()
    for status, code in ((503, "no_worker"), (503, "overloaded"), (400, "x")):
        span = telemetry.start_turn("chat", turn(), {})
        span.failed(TurnError(status, code, "No."))
        span.failed(TurnError(500, "again", "No."))
        span.first_token()
    assert value(telemetry, "turns_total", operation="chat", model="m", status="503") == 2
    assert value(telemetry, "turns_total", operation="chat", model="m", status="400") == 1
    assert value(telemetry, "turns_in_flight") == 0
    assert value(telemetry, "prompt_tokens_total", model="m") is None
    assert value(telemetry, "time_to_first_token_seconds_count", operation="chat", model="m") is None


def test_labels_are_bounded_whatever_comes():
    telemetry = Telemetry()
    for number in range(2000):
        telemetry.start_turn("chat", turn(f"model-{number}", f"session-{number}"), {}).failed(TurnError(400, "x", "y"))
        telemetry.worker_failed(f"worker-{number}")
    text = telemetry.render_metrics().decode()
    assert "session-" not in text
    models = {labels for labels in samples(telemetry) if labels[0] == "turnkeep_gateway_turns_total"}
    assert len(models) == 65
    assert value(telemetry, "turns_total", operation="chat", model="other", status="400") == 2000 - 64
    assert value(telemetry, "worker_failures_total", worker="other") == 2000 - 1024


def test_workers_are_looked_at_when_somebody_asks():
    telemetry = Telemetry()
    views = []
    telemetry.watch_pool(lambda: views)
    assert value(telemetry, "workers", state="ready") == 0
    views.extend(
        [
            WorkerView("replica-0", "unix:/a", "ready", "", None, 3, 500, 1000, 0.5),
            WorkerView("replica-1", "unix:/b", "down", "gone", None, 0, 0, 0, None),
        ]
    )
    assert value(telemetry, "workers", state="ready") == 1
    assert value(telemetry, "workers", state="down") == 1
    assert value(telemetry, "worker_up", worker="replica-0") == 1
    assert value(telemetry, "worker_up", worker="replica-1") == 0
    assert value(telemetry, "worker_in_flight", worker="replica-0") == 3
    assert value(telemetry, "worker_queued_tokens", worker="replica-0") == 500
    assert value(telemetry, "index_blocks", worker="replica-0") == 1000
    assert value(telemetry, "events_lag_seconds", worker="replica-0") == 0.5
    assert value(telemetry, "events_lag_seconds", worker="replica-1") is None
    views.clear()
    assert value(telemetry, "worker_up", worker="replica-0") is None


def test_two_gateways_in_one_process_do_not_mix():
    first, second = Telemetry(), Telemetry()
    first.start_turn("chat", turn(), {}).failed(TurnError(400, "x", "y"))
    assert value(second, "turns_total", operation="chat", model="m", status="400") is None
