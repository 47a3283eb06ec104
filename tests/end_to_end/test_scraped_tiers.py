"""What the replicas' tiers do can be read where operators look: the gateway's /metrics and /workers."""

import time

import httpx2
import pytest
from live_gateway import serve
from prometheus_client.parser import text_string_to_metric_families

TIER = "turnkeep_gateway_worker_tier_"
LOST = "turnkeep_gateway_worker_lost_blocks_total"
SESSIONS, TURNS = 8, 3


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """Two gateway processes over two simulated replicas; neither device nor tiers hold all sessions. A block takes 1 KiB."""
    disk = tmp_path_factory.mktemp("disk")
    engine = ("--engine", "sim-kv-token-bytes=64", "--engine", "sim-step=0.0001", "--engine", "scheduling=fcfs")
    tiers = ("--host-kv-bytes", "64KiB", "--disk-kv-dir", disk, "--disk-kv-bytes", "192KiB")
    options = ("--processes", 2, "--replicas", 2, "--num-blocks", 100, "--max-model-len", 1500)
    with serve("--simulate", *options, *tiers, *engine) as served:
        for turn in range(TURNS):
            for number in range(SESSIONS):
                ask(served, f"session {number} ", turn)
        yield served


def ask(served, text, turn):
    later = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}] * turn
    body = {"messages": [{"role": "user", "content": text * 200}, *later], "max_tokens": 8}
    reply = httpx2.post(served.api + "/chat/completions", json=body, headers={"Session-ID": text.strip()}, timeout=60)
    assert reply.status_code == 200, reply.text


def scraped(served):
    text = httpx2.get(served.url + "/metrics", timeout=30).text
    return {
        (sample.name, sample.labels["worker"], sample.labels.get("tier")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(TIER) or sample.name == LOST
    }


def reported(worker):
    """What the replica itself says, by the names of the gateway's metrics."""
    path = worker["url"].removeprefix("unix:")
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://replica") as client:
        stats = client.get("/v1/stats").json()
    name, found = worker["name"], {}
    for tier in stats["tiers"]:
        for field in ("blocks", "used_bytes", "max_bytes", "seconds_per_block"):
            found[TIER + field, name, tier["name"]] = tier[field]
        found[TIER + "users", name, tier["name"]] = tier.get("users", 1)
        for field in ("hit_tokens", "stored_blocks", "evicted_blocks", "healed_blocks", "errors"):
            found[f"{TIER}{field}_total", name, tier["name"]] = tier.get(f"{field}_total", 0)
    for tier, brought, useless in (
        ("host", "prefetched_blocks", "useless_prefetches"),
        ("device", "fetched_blocks", "useless_fetches"),
    ):
        found[TIER + "prefetched_blocks_total", name, tier] = stats.get(brought + "_total", 0)
        found[TIER + "useless_prefetches_total", name, tier] = stats.get(useless + "_total", 0)
    found[LOST, name, None] = stats.get("lost_blocks_total", 0)
    return found


def test_a_scrape_says_what_the_replicas_say(tiered):
    workers = httpx2.get(tiered.url + "/workers", timeout=30).json()["data"]
    deadline = time.monotonic() + 60
    # Gateways look at their workers once a second, and tiers are written to behind the answers.
    while (found := scraped(tiered)) != (said := reported(workers[0]) | reported(workers[1])):
        assert time.monotonic() < deadline, set(found.items()) ^ set(said.items())
        time.sleep(0.2)
    names = [worker["name"] for worker in workers]
    assert sorted(names) == ["replica-0", "replica-1"]
    for name in names:
        assert found[TIER + "users", name, "host"] == 2
        assert found[TIER + "max_bytes", name, "host"] == 64 * 1024
        assert 0 < found[TIER + "used_bytes", name, "disk"] <= found[TIER + "max_bytes", name, "disk"] == 192 * 1024
        assert found[TIER + "evicted_blocks_total", name, "disk"] > 0
    assert sum(found[TIER + "hit_tokens_total", name, "disk"] for name in names) > 0
    assert sum(found[LOST, name, None] for name in names) > 0


def test_the_list_of_workers_has_them_too(tiered):
    deadline = time.monotonic() + 60
    while True:
        workers = httpx2.get(tiered.url + "/workers", timeout=30).json()["data"]
        listed = {(LOST, worker["name"], None): worker["offload"]["lost_blocks"] for worker in workers} | {
            (f"{TIER}{field}_total", worker["name"], tier["name"]): tier[field]
            for worker in workers
            for tier in worker["offload"]["tiers"]
            for field in ("hit_tokens", "stored_blocks", "evicted_blocks")
        }
        said = reported(workers[0]) | reported(workers[1])
        if listed == {key: said[key] for key in listed}:
            break
        assert time.monotonic() < deadline, listed
        time.sleep(0.2)
    assert len(listed) == 2 + 2 * 2 * 3


def test_replicas_without_tiers_have_no_such_lines():
    with serve("--simulate", "--num-blocks", 100, "--max-model-len", 1500) as served:
        ask(served, "plain ", 0)
        assert scraped(served) == {}
        assert [worker["offload"] for worker in httpx2.get(served.url + "/workers").json()["data"]] == [None]
