from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.merging import merged
from gateway.telemetry.metrics import GatewayMetrics
from gateway.workers.protocol import TierStats, WorkerStats
from gateway.workers.tiers import offload_view
from gateway.workers.views import WorkerView

LOAD = {
    "instance": "i",
    "running": 0,
    "waiting": 0,
    "waiting_prompt_tokens": 0,
    "num_blocks": 10,
    "free_blocks": 10,
    "cached_blocks": 0,
    "steps_total": 0,
    "prompt_tokens_total": 0,
    "cached_tokens_total": 0,
    "generated_tokens_total": 0,
    "preemptions_total": 0,
    "requests_total": 0,
    "aborted_total": 0,
}
DISK = TierStats(
    name="disk",
    blocks=7,
    used_bytes=700,
    max_bytes=1000,
    stored_blocks_total=11,
    evicted_blocks_total=4,
    healed_blocks_total=1,
    hit_tokens_total=160,
    errors_total=2,
    seconds_per_block=0.25,
    users=3,
)
COUNTS = {
    "lost_blocks_total": 5,
    "prefetched_blocks_total": 9,
    "useless_prefetches_total": 3,
    "fetched_blocks_total": 8,
    "useful_fetches_total": 6,
    "useless_fetches_total": 2,
}


def view(name, *tiers, **counts):
    return WorkerView(
        name, "http://w", "ready", "", None, 0, 0, 0, None, offload=offload_view(WorkerStats(**LOAD, **counts, tiers=tiers))
    )


def exposed(*views):
    metrics = GatewayMetrics()
    metrics.watch_pool(lambda: views)
    return metrics.render()


def values(text):
    """name and label values -> value, of the metrics of tiers."""
    return {
        (
            sample.name.removeprefix("turnkeep_gateway_worker_"),
            *(sample.labels[label] for label in ("worker", "tier") if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if "_worker_tier_" in sample.name or "_worker_lost_" in sample.name
    }


def test_tiers_are_told_by_worker_and_tier():
    assert values(exposed(view("replica-0", DISK, **COUNTS), view("plain", **COUNTS))) == {
        ("tier_blocks", "replica-0", "disk"): 7,
        ("tier_used_bytes", "replica-0", "disk"): 700,
        ("tier_max_bytes", "replica-0", "disk"): 1000,
        ("tier_users", "replica-0", "disk"): 3,
        ("tier_seconds_per_block", "replica-0", "disk"): 0.25,
        ("tier_hit_tokens_total", "replica-0", "disk"): 160,
        ("tier_stored_blocks_total", "replica-0", "disk"): 11,
        ("tier_evicted_blocks_total", "replica-0", "disk"): 4,
        ("tier_healed_blocks_total", "replica-0", "disk"): 1,
        ("tier_errors_total", "replica-0", "disk"): 2,
        ("tier_prefetched_blocks_total", "replica-0", "host"): 9,
        ("tier_useless_prefetches_total", "replica-0", "host"): 3,
        ("tier_prefetched_blocks_total", "replica-0", "device"): 8,
        ("tier_useless_prefetches_total", "replica-0", "device"): 2,
        ("lost_blocks_total", "replica-0"): 5,
    }


def test_whatever_a_worker_calls_its_tiers_the_labels_are_bounded():
    invented = [TierStats(name=f"tier-{number}", blocks=1, used_bytes=10, max_bytes=20) for number in range(100)]
    found = values(exposed(view("w", DISK, *invented, DISK)))
    assert {labels[1:] for labels in found if labels[0] == "tier_blocks"} == {("w", "disk"), ("w", "other")}
    assert found["tier_blocks", "w", "other"] == 100
    assert found["tier_max_bytes", "w", "other"] == 2000
    assert found["tier_blocks", "w", "disk"] == 14


def test_processes_that_look_at_the_same_worker_do_not_add_it_up():
    older = TierStats(name="disk", blocks=7, used_bytes=700, max_bytes=1000, stored_blocks_total=8)
    found = values(merged([exposed(view("w", DISK, **COUNTS)), exposed(view("w", older))]))
    assert found["tier_max_bytes", "w", "disk"] == 1000
    assert found["tier_stored_blocks_total", "w", "disk"] == 11
    assert found["lost_blocks_total", "w"] == 5
