"""Child spans of a turn at the replica, as a real OTLP receiver gets them."""

import asyncio

import pytest
from live_gateway import otlp_collector
from replica_harness import Gated, running

from engine.server.tracing import traces_endpoint
from engine.thread import EngineThread

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def body(request_id="r", prompt=range(10, 50), session=None, **sampling):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling, "session": session}


def headers(flags="01"):
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


@pytest.fixture(scope="module")
def collector():
    with otlp_collector() as started:
        yield started


@pytest.fixture(autouse=True)
def forget(collector):
    collector.spans.clear()


@pytest.mark.parametrize(
    ("given", "posted"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/v1/traces", "https://host/v1/traces"),
        ("https://host/otlp/of/team", "https://host/otlp/of/team"),
    ],
)
def test_where_spans_are_posted(given, posted):
    assert traces_endpoint(given) == posted


async def test_a_request_has_queue_prefill_and_decode_below_the_caller(load, collector):
    async with running(load, otlp_url=collector.url) as replica:
        await replica.generate(body("first"))
        await replica.generate(body("second", session="s-1", max_tokens=40), headers=headers())
    spans = collector.wait_for(lambda spans: len(spans) >= 8)
    assert len(spans) == 8
    (root,) = [span for span in spans if span.name == "engine.generate" and span.trace == TRACE]
    assert root.parent == PARENT
    assert root.service == "turnkeep-engine"
    assert root.attributes["gen_ai.conversation.id"] == "s-1"
    assert root.attributes["gen_ai.usage.input_tokens"] == 40
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 32
    assert root.attributes["gen_ai.usage.output_tokens"] == 40
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["turnkeep.request_id"] == "second"
    names = ("decode_passes", "drafted_tokens", "accepted_tokens", "forced_tokens")
    passes, drafted, accepted, forced = (root.attributes[f"turnkeep.{name}"] for name in names)
    assert accepted <= drafted
    # The first token comes from the prompt's pass; a simulated engine counts no passes.
    assert passes + accepted + forced in (0, 39)
    below = {span.name: span for span in spans if span.parent == root.id}
    assert sorted(below) == ["decode", "prefill", "queue"]
    assert {span.trace for span in below.values()} == {TRACE}
    queue, prefill, decode = below["queue"], below["prefill"], below["decode"]
    assert root.start == queue.start <= queue.end == prefill.start < prefill.end == decode.start < decode.end == root.end
    (other,) = [span for span in spans if span.name == "engine.generate" and span.trace != TRACE]
    assert other.parent == ""
    assert "gen_ai.conversation.id" not in other.attributes


async def test_a_request_that_ends_early_has_the_phases_it_came_to(load, collector, monkeypatch):
    asked, abort = asyncio.Event(), EngineThread.abort

    def gated():
        return Gated(load())

    def notes_abort(engine, request_id):
        asked.set()
        return abort(engine, request_id)

    monkeypatch.setattr(EngineThread, "abort", notes_abort)

    async with running(gated, otlp_url=collector.url) as replica:
        # One that is aborted in the queue, behind one that leaves in its prefill.
        prompt = [10 + position % 300 for position in range(3000)]
        prefilling = await replica.session.post(
            replica.url + "/v1/generate", json=body("prefilling", prompt), headers=headers()
        )
        replica.core.allow(2)
        await replica.until(lambda stats: stats.steps_total == 2)
        await replica.session.post(replica.url + "/v1/generate", json=body("queued"), headers=headers())
        await replica.until(lambda stats: stats.waiting == 1)
        prefilling.close()
        aborting = asyncio.create_task(replica.post("/v1/abort", {"request_id": "queued"}))
        await asked.wait()  # before steps go on, in which it would leave the queue
        await asyncio.sleep(0)
        replica.core.open()
        assert (await aborting)[1] == b'{"aborted":true}'
        await replica.idle()
        # And one that was not sampled.
        await replica.generate(body("unsampled"), headers=headers("00"))
    spans = collector.wait_for(lambda spans: len(spans) >= 5)
    roots = {span.attributes["turnkeep.request_id"]: span for span in spans if span.name == "engine.generate"}
    assert sorted(roots) == ["prefilling", "queued"]
    phases = {name: sorted(span.name for span in spans if span.parent == root.id) for name, root in roots.items()}
    assert phases == {"prefilling": ["prefill", "queue"], "queued": ["queue"]}
    outcomes = {name: root.attributes["turnkeep.outcome"] for name, root in roots.items()}
    assert outcomes == {"prefilling": "disconnected", "queued": "abort"}


async def test_a_receiver_that_is_not_there_delays_nothing(load):
    async with running(load, otlp_url="http://127.0.0.1:9") as replica:
        for number in range(5):
            await replica.generate(body(f"r{number}"), headers=headers())
        await replica.idle()
