from prometheus_client.parser import text_string_to_metric_families

from gateway.router.peers import Peers
from gateway.router.standing import Standing
from gateway.telemetry.merging import merged
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.routing import StandingsCollector
from gateway.workers.views import WorkerView
from prefix_cache.events import Snapshot
from prefix_cache.hashing import join_digests
from prefix_cache.index import ResidencyIndex


def process(turns, in_flight, workers):
    metrics = GatewayMetrics()
    metrics.turns.labels("chat", "m", "200").inc(turns)
    for _ in range(turns):
        metrics.duration.labels("chat", "m").observe(0.5)
    metrics.in_flight.set(in_flight)
    metrics.watch_pool(
        lambda: [WorkerView(f"w{n}", "http://w", state, "", None, 2, 0, 10 * n, 1.0) for n, state in enumerate(workers)]
    )
    return metrics.render()


def values(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_processes_are_added_up_and_what_they_look_at_is_not():
    found = values(merged([process(3, 1, ["ready", "ready"]), process(4, 2, ["ready", "down"])]))
    labels = (("model", "m"), ("operation", "chat"))
    assert found["turnkeep_gateway_turns_total", (*labels, ("status", "200"))] == 7
    assert found["turnkeep_gateway_request_duration_seconds_count", labels] == 7
    assert found["turnkeep_gateway_request_duration_seconds_sum", labels] == 3.5
    assert found["turnkeep_gateway_request_duration_seconds_bucket", (("le", "0.64"), *labels)] == 7
    assert found["turnkeep_gateway_turns_in_flight", ()] == 3
    assert found["turnkeep_gateway_worker_in_flight", (("worker", "w0"),)] == 4
    assert found["turnkeep_gateway_workers", (("state", "ready"),)] == 2
    # Up for both is up; what one cannot reach is not.
    assert found["turnkeep_gateway_worker_up", (("worker", "w0"),)] == 1
    assert found["turnkeep_gateway_worker_up", (("worker", "w1"),)] == 0
    assert found["turnkeep_gateway_index_blocks", (("worker", "w1"),)] == 10
    memory = {labels for name, labels in found if name == "process_resident_memory_bytes"}
    assert memory == {(("process", "0"),), (("process", "1"),)}


def test_one_process_and_none_that_can_be_read():
    one = process(3, 1, ["ready"])
    mine, alone = values(merged([one])), values(one)
    assert {key: value for key, value in mine.items() if not key[0].startswith("process_")} == {
        key: value for key, value in alone.items() if not key[0].startswith("process_")
    }
    assert values(merged([one, b"this is { no metric\n"])) == mine
    assert merged([]).strip() in (b"", b"# EOF")


def test_what_each_process_knows_of_the_same_workers_counts_once():
    def routing(blocks, broken):
        index = ResidencyIndex()
        names = [bytes([number]) * 16 for number in range(blocks)]
        for _ in index.load_snapshot("w", Snapshot("i", 1, {"device": join_digests(names)})):
            pass
        standing = Standing("w", Peers(), 60.0, 0.0)
        standing.trust.broken = broken
        metrics = GatewayMetrics()
        metrics.registry.register(StandingsCollector(lambda: {"w": standing}, index))
        return metrics.render()

    found = values(merged([routing(5, 0.25), routing(4, 0.125)]))
    worker = (("worker", "w"),)
    assert found["turnkeep_gateway_index_distinct_blocks", ()] == 5
    assert found["turnkeep_gateway_worker_trust", worker] == 2
    assert found["turnkeep_gateway_worker_broken_promises", worker] == 0.25
    alone = values(routing(0, 0.0))
    for name in ("turnkeep_gateway_worker_prefill_seconds_per_token", "turnkeep_gateway_worker_estimate_error"):
        assert found[name, worker] == alone[name, worker]
