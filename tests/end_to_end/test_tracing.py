"""One trace from the client through the gateway to the replica, over OTLP to a real receiver."""

TRACE = "11f7651916cd43dd8448eb211c80319c"
PARENT = "22ad6b7169203331"


def test_a_turn_is_one_trace_with_the_replicas_work_below_it(web, collector):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Trace me."}], "max_tokens": 6, "temperature": 0}
    headers = {"Session-ID": "traced", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    reply = web.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200

    def complete(spans):
        return len([s for s in spans if s.trace == TRACE]) >= 5

    spans = [s for s in collector.wait_for(complete) if s.trace == TRACE]
    (turn,) = [s for s in spans if s.name == "chat smollm2"]
    assert turn.parent == PARENT
    assert turn.attributes["gen_ai.operation.name"] == "chat"
    assert turn.attributes["gen_ai.provider.name"] == "turnkeep"
    assert turn.attributes["gen_ai.conversation.id"] == "traced"
    assert turn.attributes["gen_ai.usage.input_tokens"] == reply.json()["usage"]["prompt_tokens"]
    assert turn.attributes["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert turn.attributes["turnkeep.replica"] == reply.headers["X-Turnkeep-Replica"]

    by_name = {s.name: s for s in spans}
    generate = by_name["engine.generate"]
    assert generate.service == "turnkeep-engine"
    assert generate.parent == turn.id
    for part in ("queue", "prefill", "decode"):
        (child,) = [s for s in spans if s.name.endswith(part)]
        assert child.parent == generate.id
        assert turn.start <= child.start <= child.end
    parts = [next(s for s in spans if s.name.endswith(part)) for part in ("queue", "prefill", "decode")]
    assert parts[0].end <= parts[1].start + 1_000_000
    assert parts[1].end <= parts[2].start + 1_000_000
