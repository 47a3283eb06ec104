"""What docs/worker-protocol.md promises, over real sockets, of a simulated replica and of one that runs a model."""

import asyncio
import re
import socket
import threading

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from replica_harness import decode_chunks, decode_message, running, simulated, tokens_of

from engine.server.listen import TCPAddress, UnixAddress
from gateway.workers.protocol import (
    PROTOCOL_VERSION,
    Done,
    Finished,
    GenerateRequest,
    SamplingParams,
    Started,
    StartupSeconds,
    SupersedeRequest,
    Tokens,
    WorkerInfo,
)
from prefix_cache.events import BlocksStored, EventBatch, Heartbeat, Snapshot
from prefix_cache.hashing import block_digests, pack_tokens, split_digests

MSGPACK = "application/msgpack"


def body(request_id="r", prompt=range(10, 50), **changes):
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **changes.pop("sampling", {})}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling": sampling, **changes}


async def test_health_info_and_stats(load):
    async with running(load) as replica:
        status, answer = await replica.get("/health")
        assert status == 200
        health = msgspec.json.decode(answer)
        info = msgspec.json.decode((await replica.get("/v1/info"))[1], type=WorkerInfo)
        assert info == replica.core.info
        assert (health["status"], health["instance"], health["model"]) == ("ok", info.instance, info.model)
        if info.simulated:
            assert "startup" not in health
            assert info.startup is None
        else:
            assert msgspec.convert(health["startup"], StartupSeconds) == info.startup
            metrics = (await replica.get("/metrics"))[1].decode()
            for part in ("load", "compile", "warm_up"):
                (value,) = re.findall(rf'turnkeep_engine_startup_seconds{{part="{part}"}} (\S+)', metrics)
                assert float(value) == getattr(info.startup, part)
            assert info.startup.load > 0
        assert (info.protocol_version, info.block_size, info.num_blocks) == (PROTOCOL_VERSION, 16, 256)
        stats = await replica.stats()
        assert (stats.running, stats.waiting, stats.free_blocks, stats.requests_total) == (0, 0, 256, 0)
        assert stats.instance == info.instance


async def test_a_stream_is_started_tokens_finished_done(load):
    async with running(load) as replica:
        chunks = await replica.generate(body())
        assert isinstance(chunks[0], Started)
        assert (chunks[0].prompt_tokens, chunks[0].cached_tokens) == (40, 0)
        assert [type(chunk) for chunk in chunks[-2:]] == [Finished, Done]
        assert all(isinstance(chunk, Tokens) for chunk in chunks[1:-2])
        assert len(tokens_of(chunks)) == 8
        assert chunks[-2].finish_reason == "length"
        done = chunks[-1]
        assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens, done.preemptions) == (40, 8, 0, 0)
        assert done.queue_seconds >= 0
        assert done.prefill_seconds > 0
        assert done.decode_seconds > 0
        again = await replica.generate(body("again"))
        assert again[0].cached_tokens == 32
        assert tokens_of(again) == tokens_of(chunks)
        stats = await replica.idle()
        assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.generated_tokens_total) == (80, 32, 16)


async def test_json_and_messagepack_mean_the_same(load):
    async with running(load) as replica:
        plain = await replica.generate(body())
        packed = GenerateRequest(
            request_id="packed",
            packed_token_ids=pack_tokens(range(10, 50)),
            sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
            session="s",
        )
        answer = await replica.generate(msgspec.msgpack.encode(packed), content_type="application/msgpack")
        assert tokens_of(answer) == tokens_of(plain)
        answer = await replica.generate(msgspec.json.encode(packed))
        assert tokens_of(answer) == tokens_of(plain)


async def test_choices_each_end_once(load):
    async with running(load) as replica:
        chunks = await replica.generate(body(sampling={"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12}))
        assert [len(tokens_of(chunks, index)) for index in range(3)] == [12, 12, 12]
        assert sorted(chunk.index for chunk in chunks if isinstance(chunk, Finished)) == [0, 1, 2]
        assert [type(chunk) for chunk in chunks].count(Done) == 1
        assert chunks[-1].completion_tokens == 36
        await replica.idle()


async def test_two_hundred_at_once(load):
    async with running(load) as replica:
        alone = {
            number: tokens_of(await replica.generate(body(f"a{number}", range(number, number + 30)))) for number in range(5)
        }
        answers = await asyncio.gather(
            *(replica.generate(body(f"r{number}", range(number % 5, number % 5 + 30))) for number in range(200))
        )
        for number, chunks in enumerate(answers):
            assert tokens_of(chunks) == alone[number % 5]
            assert isinstance(chunks[-1], Done)
        stats = await replica.idle()
        assert stats.requests_total == 205
        assert stats.generated_tokens_total == 205 * 8


async def test_abort_by_request_ends_the_stream_as_promised(load):
    async with running(load) as replica:
        stream = asyncio.create_task(replica.generate(body("long", sampling={"max_tokens": 3000, "n": 2})))
        await replica.until(lambda stats: stats.generated_tokens_total > 4)
        status, answer = await replica.post("/v1/abort", {"request_id": "long"})
        assert (status, msgspec.json.decode(answer)) == (200, {"aborted": True})
        chunks = await stream
        assert [type(chunk) for chunk in chunks[-3:]] == [Finished, Finished, Done]
        assert {(chunk.index, chunk.finish_reason) for chunk in chunks[-3:-1]} == {(0, "abort"), (1, "abort")}
        assert chunks[-1].completion_tokens == len(tokens_of(chunks)) + len(tokens_of(chunks, 1)) < 6000
        stats = await replica.idle()
        assert stats.aborted_total == 1
        status, answer = await replica.post("/v1/abort", {"request_id": "long"})
        assert msgspec.json.decode(answer) == {"aborted": False}
        # The id may be used again.
        assert len(tokens_of(await replica.generate(body("long")))) == 8


async def test_superseded_blocks_are_the_first_to_go(load):
    async with running(lambda: load(num_blocks=16)) as replica:
        info = replica.core.info
        assert info.capabilities.supersede
        kept, left = [7] * 80, [9] * 80
        await replica.generate(body("kept", prompt=kept, sampling={"max_tokens": 1}))
        await replica.generate(body("left", prompt=left, sampling={"max_tokens": 1}))
        joined = b"".join(block_digests(pack_tokens(left), bytes.fromhex(info.namespace), 16))
        status, answer = await replica.post(
            "/v1/supersede", msgspec.msgpack.encode(SupersedeRequest(joined + bytes(16))), MSGPACK
        )
        assert (status, msgspec.json.decode(answer)) == (200, {"marked": 5})
        # Ten blocks are cached and six free; this needs ten. The older prompt stays, as the younger one was given up.
        await replica.generate(body("new", prompt=[11] * 160, sampling={"max_tokens": 1}))
        started = (await replica.generate(body("again", prompt=kept, sampling={"max_tokens": 1})))[0]
        assert started.cached_tokens == 64
        status, answer = await replica.post("/v1/supersede", msgspec.msgpack.encode(SupersedeRequest(b"short")), MSGPACK)
        assert (status, msgspec.json.decode(answer)["error"]["field"]) == (400, "digests")


async def test_disconnect_aborts_while_decoding_and_while_queued(load):
    async with running(load) as replica:
        streams = [
            await replica.session.post(
                replica.url + "/v1/generate",
                json=body(f"r{number}", range(number, number + 40), sampling={"max_tokens": 3000}),
            )
            for number in range(40)  # 32 run, 8 wait
        ]
        await replica.until(
            lambda stats: stats.running + stats.waiting == 40 and stats.waiting and stats.generated_tokens_total > 40
        )
        for stream in streams:
            stream.close()
        stats = await replica.idle()
        assert stats.aborted_total == 40
        assert stats.generated_tokens_total < 40 * 3000
        assert len(tokens_of(await replica.generate(body()))) == 8


async def test_one_id_at_a_time(load):
    async with running(load) as replica:
        first = await replica.session.post(replica.url + "/v1/generate", json=body("same", sampling={"max_tokens": 3000}))
        status, error = await replica.refused(body("same"))
        assert (status, error["code"], error["field"]) == (409, "duplicate_request_id", "request_id")
        first.close()
        await replica.idle()
        assert len(tokens_of(await replica.generate(body("same")))) == 8


@pytest.mark.parametrize(
    ("change", "status", "code", "field"),
    [
        ({"token_ids": []}, 400, "empty_prompt", "token_ids"),
        ({"token_ids": None}, 400, "invalid_request", "token_ids"),
        ({"token_ids": [5, 4000]}, 400, "invalid_token", "token_ids[1]"),
        ({"token_ids": [5, "x"]}, 400, "invalid_request", "token_ids[1]"),
        ({"token_ids": [1] * 5000}, 400, "context_length_exceeded", "token_ids"),
        ({"sampling": {"max_tokens": "many"}}, 400, "invalid_request", "sampling.max_tokens"),
        ({"sampling": {"temperature": -1}}, 400, "invalid_sampling", "sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, 400, "invalid_sampling", "sampling.max_tokens"),
        ({"sampling": {"logit_bias": {"x": 1}}}, 400, "invalid_request", "sampling.logit_bias"),
        ({"sampling": {"stop": ["a", 1]}}, 400, "invalid_request", "sampling.stop[1]"),
        ({"sampling": {"temprature": 1}}, 400, "invalid_request", "sampling.temprature"),
        ({"max_tokens": 5}, 400, "invalid_request", "max_tokens"),
        ({"request_id": ""}, 400, "invalid_request", "request_id"),
        ({"request_id": "x" * 257}, 400, "invalid_request", "request_id"),
        ({"packed_token_ids": "AAAA"}, 400, "invalid_request", "token_ids"),
    ],
)
@pytest.mark.parametrize("load", ["simulated"], indirect=True)
async def test_refusals_name_the_field(load, change, status, code, field):
    async with running(load) as replica:
        answered, error = await replica.refused({**body(), **change})
        assert (answered, error["code"], error.get("field")) == (status, code, field)
        assert error["message"].endswith(".")
        assert (await replica.get("/health"))[0] == 200


async def test_refusals_of_the_engine_itself(load):
    async with running(load) as replica:
        for change, code, field in [
            ({"token_ids": [1] * 5000}, "context_length_exceeded", "token_ids"),
            ({"token_ids": [5, 4000]}, "invalid_token", "token_ids[1]"),
            ({"sampling": {"top_p": 2}}, "invalid_sampling", "sampling.top_p"),
            ({"sampling": {"n": 64}}, "invalid_sampling", "sampling.n"),
        ]:
            status, error = await replica.refused({**body(), **change})
            assert (status, error["code"], error["field"]) == (400, code, field)
        status, error = await replica.refused({**body(), "grammar": "{"})
        assert status == 422
        assert error["code"] in ("invalid_grammar", "unsupported_grammar")
        assert (await replica.stats()).requests_total == 0


async def test_bodies_that_are_none(load):
    async with running(load, max_body=20_000) as replica:
        for content_type, data, status, code in [
            ("application/json", b"{", 400, "malformed_body"),
            ("application/json", b"", 400, "malformed_body"),
            ("application/json", b'{"request_id": "\xff"}', 400, "malformed_body"),
            ("application/json", b"[]", 400, "invalid_request"),
            ("application/json", b"{}", 400, "invalid_request"),
            ("application/msgpack", b"\xc1", 400, "malformed_body"),
            ("application/msgpack", b"", 400, "malformed_body"),
            ("text/plain", b"{}", 415, "unsupported_media_type"),
            ("application/x-www-form-urlencoded", b"a=b", 415, "unsupported_media_type"),
            ("application/json", b"[" * 19_000, 400, "invalid_request"),
            ("application/json", b" " * 20_001, 413, "body_too_large"),
        ]:
            answered, error = await replica.refused(data, content_type=content_type)
            assert (answered, error["code"]) == (status, code), data[:30]

        async def endless():
            for _ in range(1000):
                yield b" " * 1000

        async with replica.session.post(
            replica.url + "/v1/generate", data=endless(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413
        status, answer = await replica.get("/v1/nothing")
        assert (status, msgspec.json.decode(answer)["error"]["code"]) == (404, "not_found")
        status, answer = await replica.get("/v1/generate")
        assert (status, msgspec.json.decode(answer)["error"]["code"]) == (405, "method_not_allowed")
        status, answer = await replica.post("/v1/abort", {"id": "x"})
        assert (status, msgspec.json.decode(answer)["error"]["field"]) == (400, "id")
        status, answer = await replica.get("/v1/kv_events?after=-1")
        assert (status, msgspec.json.decode(answer)["error"]["field"]) == (400, "after")
        await replica.idle()


async def test_more_blocks_than_the_pool_can_ever_hold(load):
    async with running(lambda: load(num_blocks=10)) as replica:
        for prompt, max_tokens in [(500, 8), (100, 200)]:
            status, error = await replica.refused(body(prompt=[5] * prompt, sampling={"max_tokens": max_tokens}))
            assert (status, error["code"], error["field"]) == (400, "kv_capacity_exceeded", "sampling.max_tokens")
            needed = -(-(prompt + max_tokens - 1) // 16)  # the last token's KV is never needed
            assert f"need {needed} KV blocks" in error["message"]
            assert "has 10 in all" in error["message"]
            assert replica.core.stats().requests_total == 0
        assert len(tokens_of(await replica.generate(body(prompt=[5] * 100, sampling={"max_tokens": 60})))) == 60
        # Many that fit one by one, and not together.
        answers = await asyncio.gather(
            *(
                replica.generate(body(f"r{number}", [number + 3] * 70, sampling={"max_tokens": 40, "n": 1 + number % 2}))
                for number in range(12)
            )
        )
        assert all(len(tokens_of(chunks)) == 40 for chunks in answers)
        await replica.idle()


async def test_until_the_model_is_loaded_it_says_so():
    loading, go_on = threading.Event(), threading.Event()

    def slow():
        loading.set()
        assert go_on.wait(20)
        return simulated()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def early():
        await asyncio.to_thread(loading.wait, 20)
        async with aiohttp.ClientSession() as session:
            for path in ("/health", "/v1/info", "/v1/stats", "/metrics", "/v1/kv_events"):
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    answers.append((response.status, (await response.json())["error"]["code"]))
            async with session.post(f"http://127.0.0.1:{port}/v1/generate", json=body()) as response:
                answers.append((response.status, (await response.json())["error"]["code"]))
        go_on.set()

    answers = []
    asking = asyncio.create_task(early())
    async with running(slow, TCPAddress("127.0.0.1", port)) as replica:
        await asking
        assert (await replica.get("/health"))[0] == 200
    assert answers == [(503, "starting")] * 6


async def test_a_full_queue_says_when_to_come_again():
    async with running(lambda: simulated(max_num_seqs=1), max_requests=3) as replica:
        streams = [
            await replica.session.post(replica.url + "/v1/generate", json=body(f"r{number}", sampling={"max_tokens": 3000}))
            for number in range(3)
        ]
        async with replica.session.post(replica.url + "/v1/generate", json=body("late")) as response:
            assert response.status == 503
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            error = msgspec.json.decode(await response.read())["error"]
        assert error["code"] == "queue_full"
        assert "3 requests" in error["message"]
        assert (await replica.get("/health"))[0] == 200  # busy is not ill
        streams[2].close()
        await replica.until(lambda stats: stats.waiting == 1)
        retried = asyncio.create_task(replica.generate(body("late")))
        for stream in streams[:2]:
            stream.close()
        assert len(tokens_of(await retried)) == 8
        await replica.idle()


async def test_metrics_tell_what_happened(load):
    async with running(load) as replica:
        for number in range(3):
            await replica.generate(body(f"r{number}"))
        await replica.idle()
        status, text = await replica.get("/metrics")
        assert status == 200
        families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        prefix = "turnkeep_engine_"

        def value(name, suffix="", **labels):
            wanted = prefix + name + suffix
            return next(
                sample.value
                for family in families.values()
                for sample in family.samples
                if sample.name == wanted and labels.items() <= sample.labels.items()
            )

        assert value("prompt_tokens", "_total") == 120
        assert value("cached_tokens", "_total") == 64
        assert value("generated_tokens", "_total") == 24
        assert value("requests_running") == value("requests_waiting") == 0
        assert sum(value("kv_blocks", state=state) for state in ("free", "cached", "referenced")) == 256
        assert value("kv_blocks", state="referenced") == 0
        for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "request_duration_seconds"):
            assert value(name, "_count") == 3
        assert value("time_to_first_token_seconds", "_count") == 3
        assert value("inter_token_latency_seconds", "_count") == 21
        assert value("step_seconds", "_count") == value("steps", "_total") >= 24
        assert value("requests_ended", "_total", outcome="length") == 3
        assert value("preemptions", "_total") == 0


async def read_lines(response, count):
    async with asyncio.timeout(20):
        return [decode_message(await response.content.readline()) for _ in range(count)]


async def read_batches(response, count):
    """The next messages that are no heartbeats."""
    found = []
    while len(found) < count:
        (message,) = await read_lines(response, 1)
        if not isinstance(message, Heartbeat):
            found.append(message)
    return found


async def test_kv_events_snapshot_replay_and_heartbeats(load):
    async with running(load) as replica:
        instance, root = replica.core.info.instance, bytes.fromhex(replica.core.info.namespace)
        async with replica.session.get(replica.url + "/v1/kv_events") as response:
            first, beat = await read_lines(response, 2)
            assert first == Snapshot(instance, 0, first.tiers)
            assert not first.tiers.get("device")
            assert beat == Heartbeat(instance, 0)
            await replica.generate(body())
            (batch,) = await read_batches(response, 1)
            digests = block_digests(list(range(10, 50)), root)
            assert batch == EventBatch(instance, 1, (BlocksStored(b"".join(digests), root),))
        await replica.generate(body("other", range(100, 140)))
        # Who comes back gets what was missed; who comes late, or from another life, a snapshot.
        async with replica.session.get(f"{replica.url}/v1/kv_events?instance={instance}&after=1") as response:
            (missed,) = await read_lines(response, 1)
            assert isinstance(missed, EventBatch)
            assert missed.seq == 2
        for query in ("", "?instance=another&after=1", f"?instance={instance}&after=99"):
            async with replica.session.get(replica.url + "/v1/kv_events" + query) as response:
                (snapshot,) = await read_lines(response, 1)
                assert isinstance(snapshot, Snapshot)
                assert snapshot.seq >= 2
                assert set(digests) <= set(split_digests(snapshot.tiers["device"]))
        async with replica.session.get(f"{replica.url}/v1/kv_events?instance={instance}&after={snapshot.seq}") as response:
            assert await read_lines(response, 1) == [Heartbeat(instance, snapshot.seq)]


async def test_over_a_unix_socket(load, tmp_path):
    path = tmp_path / "replica.sock"
    async with running(load, UnixAddress(path)) as replica:
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(tokens_of(await replica.generate(body()))) == 8
    assert not path.exists()


async def test_tokens_come_as_they_are_made():
    async with running(lambda: simulated()) as replica:
        async with replica.session.post(replica.url + "/v1/generate", json=body(sampling={"max_tokens": 1000})) as response:
            first = decode_chunks(await response.content.readline())
            second = decode_chunks(await response.content.readline())
            assert [type(chunk) for chunk in first + second] == [Started, Tokens]
            assert (await replica.stats()).generated_tokens_total < 900
        await replica.idle()
