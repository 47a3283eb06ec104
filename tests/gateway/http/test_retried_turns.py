"""A retry of a turn in flight attaches to it: real HTTP in front of a scripted worker."""

import asyncio
import contextlib
import gc
import tracemalloc

import orjson
import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway

from gateway.turns.config import TurnsConfig

TEXT = "It is twelve degrees in Ghent, and it will rain."
MESSAGES = [{"role": "user", "content": "weather?"}]
CHAT = "/v1/chat/completions"


def body(**fields):
    return {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, **fields}


def named(**more):
    return {"Session-ID": "s1", **more}


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing tells a test of it
            await asyncio.sleep(0.002)


def text_of(raw):
    frames = [frame.removeprefix("data: ") for frame in raw.decode().split("\n\n") if frame.startswith("data: ")]
    assert frames[-1] == "[DONE]", frames[-1]
    chunks = [orjson.loads(frame) for frame in frames[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def metric(gateway, result):
    line = f'turnkeep_gateway_turns_attached_total{{result="{result}"}} '
    found = [row for row in gateway.telemetry.render_metrics().decode().splitlines() if row.startswith(line)]
    return float(found[0].removeprefix(line)) if found else 0.0


class Call:
    """One request, running by itself. `begun` once its headers are here."""

    def __init__(self, gateway, data, headers, path=CHAT):
        self.begun = asyncio.Event()
        self.headers = {}
        self.status = None
        self.task = asyncio.create_task(self._run(gateway, path, data, headers))

    async def _run(self, gateway, path, data, headers):
        async with gateway.post(path, data, headers=headers) as response:
            self.headers, self.status = response.headers, response.status
            self.begun.set()
            return await response.read()

    async def leave(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
def paused(gateway):
    """The worker says five tokens, then waits for the event."""
    go_on = asyncio.Event()
    gateway.dispatcher.script = Script(TEXT, pause=(5, go_on))
    return go_on


@pytest.mark.parametrize("first_streams", [True, False])
@pytest.mark.parametrize("retry_streams", [True, False])
async def test_a_retry_gets_the_whole_answer_of_the_turn_in_flight(gateway, paused, first_streams, retry_streams):
    first = Call(gateway, body(stream=first_streams), named(**{"X-Request-ID": "first"}))
    await until(lambda: gateway.dispatcher.generations and gateway.dispatcher.generations[0].taken >= 5)
    retry = Call(gateway, body(stream=retry_streams, stream_options=None), named())
    await until(lambda: metric(gateway, "running") == 1)
    paused.set()
    answers = [await first.task, await retry.task]
    assert len(gateway.dispatcher.requests) == 1
    assert retry.headers["X-Turnkeep-Attached"] == "running; request=first"
    assert "X-Turnkeep-Attached" not in first.headers
    ids, texts = set(), []
    for answer, streams in zip(answers, (first_streams, retry_streams), strict=True):
        if streams:
            texts.append(text_of(answer))
            ids.add(orjson.loads(answer.decode().split("\n\n")[0].removeprefix("data: "))["id"])
        else:
            whole = orjson.loads(answer)
            texts.append(whole["choices"][0]["message"]["content"])
            ids.add(whole["id"])
    assert texts == [TEXT, TEXT]
    assert len(ids) == 1
    # One generation, one record, counted once.
    await until(lambda: gateway.dispatcher.open == 0)
    [record] = await gateway.observer.wait(1)
    assert (record.status, record.completion_tokens) == (200, gateway.dispatcher.generations[0].taken)
    metrics = gateway.telemetry.render_metrics().decode()
    assert f'turnkeep_gateway_completion_tokens_total{{model="tiny"}} {float(record.completion_tokens)}' in metrics
    assert 'turnkeep_gateway_routes_total{reason="prefix"} 1.0' in metrics
    assert 'turnkeep_gateway_turns_total{model="tiny",operation="chat",status="200"} 2.0' in metrics


async def test_the_first_client_leaves_and_the_generation_goes_on_until_the_last_one_does(gateway, paused):
    first = Call(gateway, body(stream=True), named())
    await first.begun.wait()
    second = Call(gateway, body(stream=True), named())
    third = Call(gateway, body(stream=False), named())
    await until(lambda: metric(gateway, "running") == 2)
    generation = gateway.dispatcher.generations[0]
    await first.leave()
    await until(lambda: b'status="499"' in gateway.telemetry.render_metrics())
    assert not generation.closed
    await third.leave()
    await until(lambda: len(gateway.observer.records) == 2)
    assert not generation.closed
    paused.set()
    assert text_of(await second.task) == TEXT
    records = await gateway.observer.wait(3)
    assert [record.status for record in records] == [499, 499, 200]
    assert records[-1].response["choices"][0]["message"]["content"] == TEXT


async def test_when_all_leave_the_worker_is_told_at_once(gateway, paused):
    calls = [Call(gateway, body(stream=True), named()) for _ in range(3)]
    for call in calls:
        await call.begun.wait()
    assert len(gateway.dispatcher.generations) == 1
    for call in calls:
        await call.leave()
    await asyncio.wait_for(gateway.dispatcher.closed.wait(), 1)
    # What was aborted is not found again.
    gateway.dispatcher.script = Script("anew")
    assert text_of(await Call(gateway, body(stream=True), named()).task) == "anew"
    assert len(gateway.dispatcher.requests) == 2


async def test_a_retry_attaches_while_the_prompt_is_still_on_its_way(gateway, monkeypatch):
    gate = asyncio.Event()
    dispatch = gateway.dispatcher.dispatch

    async def slow(**request):
        await gate.wait()
        return await dispatch(**request)

    monkeypatch.setattr(gateway.dispatcher, "dispatch", slow)
    first = Call(gateway, body(), named())
    second = Call(gateway, body(), named())
    await until(lambda: metric(gateway, "running") == 1)
    await first.leave()
    gate.set()
    assert orjson.loads(await second.task)["choices"][0]["message"]["content"] == "Hello there"
    assert len(gateway.dispatcher.requests) == 1


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        ({}, {}, {}),  # strangers
        ({"Correlation-ID": "job"}, {"Correlation-ID": "job"}, {}),
        ({"X-SMG-Routing-Key": "k"}, {"X-SMG-Routing-Key": "k"}, {}),
        ({}, {}, {"prompt_cache_key": "app"}),
        ({"Session-ID": "a"}, {"Session-ID": "b"}, {}),
        ({"Session-ID": "a"}, {"Session-ID": "a"}, {"seed": 5}),
        ({"Session-ID": "a"}, {"Session-ID": "a"}, {"messages": [*MESSAGES, {"role": "user", "content": "well?"}]}),
        ({"Session-ID": "a", "Idempotency-Key": "1"}, {"Session-ID": "a", "Idempotency-Key": "2"}, {}),
        ({"Session-ID": "a", "Idempotency-Key": "1"}, {"Session-ID": "a"}, {}),
        ({"Session-ID": "a", "Authorization": "Bearer A"}, {"Session-ID": "a", "Authorization": "Bearer B"}, {}),
        ({"Idempotency-Key": "1", "Authorization": "Bearer A"}, {"Idempotency-Key": "1", "Authorization": "Bearer B"}, {}),
    ],
)
async def test_what_is_no_retry_gets_a_generation_of_its_own(gateway, paused, one, other, changed):
    both = {"prompt_cache_key": changed.pop("prompt_cache_key", None)}
    calls = [Call(gateway, body(stream=True, **both), one)]
    await calls[0].begun.wait()
    calls.append(Call(gateway, body(stream=True, **both, **changed), other))
    await until(lambda: len(gateway.dispatcher.generations) == 2)
    paused.set()
    for call in calls:
        assert text_of(await call.task) == TEXT
        assert "X-Turnkeep-Attached" not in call.headers


async def test_chat_and_completions_are_two_things(gateway, paused):
    first = Call(gateway, body(stream=True), {"Idempotency-Key": "k"})
    await first.begun.wait()
    second = Call(gateway, {"prompt": "weather?"}, {"Idempotency-Key": "k"}, "/v1/completions")
    await until(lambda: len(gateway.dispatcher.generations) == 2)
    paused.set()
    await asyncio.gather(first.task, second.task)
    assert orjson.loads(second.task.result())["object"] == "text_completion"


async def test_completions_attach_with_their_prompt_ids(gateway, paused):
    data = {"prompt": ["ab", "cd"], "return_token_ids": True, "max_tokens": 100}
    first = Call(gateway, data, named(), "/v1/completions")
    await until(lambda: len(gateway.dispatcher.generations) == 2)
    retry = Call(gateway, {**data, "stream": True}, named(), "/v1/completions")
    await until(lambda: metric(gateway, "running") == 1)
    paused.set()
    whole = orjson.loads(await first.task)
    frames = [f.removeprefix("data: ") for f in (await retry.task).decode().split("\n\n") if f]
    chunks = [orjson.loads(frame) for frame in frames[:-1]]
    assert frames[-1] == "[DONE]"
    for index, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"] != []
        assert [token for c in mine for token in c.get("token_ids", ())] == choice["token_ids"]
        assert "".join(c["text"] for c in mine) == choice["text"] == TEXT
    assert len(gateway.dispatcher.requests) == 2


async def test_a_key_answers_again_after_the_end_and_only_within_its_tenant(gateway):
    gateway.dispatcher.script = Script(TEXT)
    key = {"Idempotency-Key": "turn-7"}
    first = await gateway.json(CHAT, body(), headers=key)
    again = Call(gateway, body(stream=True), key)
    assert text_of(await again.task) == TEXT
    assert again.headers["X-Turnkeep-Attached"].startswith("finished; request=")
    assert await gateway.json(CHAT, body(), headers=key) == first
    assert (len(gateway.dispatcher.requests), metric(gateway, "finished")) == (1, 2)
    other = await gateway.json(CHAT, body(), headers={**key, "Authorization": "Bearer B"})
    assert other["id"] != first["id"]
    assert len(gateway.dispatcher.requests) == 2


@pytest.mark.parametrize("ended", [True, False])
async def test_a_key_that_comes_with_another_body_is_an_error_that_says_so(gateway, paused, ended):
    key = {"Idempotency-Key": "turn-7"}
    if ended:
        paused.set()
    first = Call(gateway, body(stream=True), key)
    await (first.task if ended else first.begun.wait())
    error = await gateway.json(CHAT, body(seed=1), headers=key, status=422)
    assert error["error"]["code"] == "idempotency_key_reused"
    assert error["error"]["param"] == "Idempotency-Key"
    assert "Use a new key" in error["error"]["message"]
    paused.set()
    assert text_of(await first.task) == TEXT


async def test_a_session_alone_does_not_replay_what_has_ended(gateway):
    for _ in range(2):
        await gateway.json(CHAT, body(), headers=named())
    assert len(gateway.dispatcher.requests) == 2


@pytest.mark.parametrize("turns", [TurnsConfig(answer_ttl=0.0), TurnsConfig(max_answers=0), TurnsConfig(attach=False)])
async def test_answers_need_not_be_kept(tiny_model, turns):
    async with run_gateway(tiny_model, turns=turns) as gateway:
        for _ in range(2):
            await gateway.json(CHAT, body(), headers={"Idempotency-Key": "k"})
        assert len(gateway.dispatcher.requests) == 2


async def test_the_oldest_kept_answer_makes_room(tiny_model):
    async with run_gateway(tiny_model, turns=TurnsConfig(max_answers=2)) as gateway:
        for key in "abcbca":
            await gateway.json(CHAT, body(), headers={"Idempotency-Key": key})
        # a was pushed out by c; b and c were answered again.
        assert len(gateway.dispatcher.requests) == 4


async def test_a_failed_turn_is_no_answer_to_keep(gateway):
    gateway.dispatcher.script = Script(late_error=RuntimeError("boom"))
    key = {"Idempotency-Key": "k"}
    await gateway.json(CHAT, body(), headers=key, status=500)
    gateway.dispatcher.script = Script("better")
    assert (await gateway.json(CHAT, body(), headers=key))["choices"][0]["message"]["content"] == "better"


async def test_all_who_read_hear_of_a_failure(gateway):
    go_on = asyncio.Event()
    gateway.dispatcher.script = Script(TEXT, pause=(5, go_on), late_error=RuntimeError("boom"))
    streamed = Call(gateway, body(stream=True), named())
    await streamed.begun.wait()
    whole = Call(gateway, body(), named())
    await until(lambda: metric(gateway, "running") == 1)
    go_on.set()
    assert b'"code":"internal_error"' in await streamed.task
    assert b"[DONE]" not in streamed.task.result()
    await whole.task
    assert whole.status == 500


async def test_a_turn_that_says_too_much_is_not_attached_to_as_a_stream(tiny_model):
    async with run_gateway(tiny_model, turns=TurnsConfig(max_turn_bytes=1000)) as gateway:
        go_on = asyncio.Event()
        gateway.dispatcher.script = Script(TEXT, pause=(30, go_on))
        first = Call(gateway, body(stream=True), named())
        await until(lambda: gateway.dispatcher.generations and gateway.dispatcher.generations[0].taken >= 30)
        whole = Call(gateway, body(stream=False), named())  # needs no event from the beginning
        await until(lambda: metric(gateway, "running") == 1)
        retry = Call(gateway, body(stream=True), named())
        await until(lambda: len(gateway.dispatcher.generations) == 2)
        assert metric(gateway, "refused") == 1
        go_on.set()
        assert text_of(await first.task) == text_of(await retry.task) == TEXT
        assert orjson.loads(await whole.task)["choices"][0]["message"]["content"] == TEXT
        assert "X-Turnkeep-Attached" not in retry.headers


async def test_a_third_try_attaches_to_the_second_where_the_first_has_said_too_much(tiny_model):
    async with run_gateway(tiny_model, turns=TurnsConfig(max_turn_bytes=1000)) as gateway:
        go_on = asyncio.Event()
        gateway.dispatcher.script = Script(TEXT, pause=(30, go_on))
        first = Call(gateway, body(stream=True), named())
        await until(lambda: gateway.dispatcher.generations and gateway.dispatcher.generations[0].taken >= 30)
        gateway.dispatcher.script = Script(TEXT, pause=(1, go_on))
        second = Call(gateway, body(stream=True), named())
        await until(lambda: len(gateway.dispatcher.generations) == 2)
        third = Call(gateway, body(stream=True), named())
        await until(lambda: metric(gateway, "running") == 1 or len(gateway.dispatcher.generations) == 3)
        go_on.set()
        assert text_of(await first.task) == text_of(await second.task) == text_of(await third.task) == TEXT
        assert len(gateway.dispatcher.generations) == 2
        assert metric(gateway, "refused") == 1
        assert third.headers["X-Turnkeep-Attached"] == f"running; request={second.headers['X-Request-ID']}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_turn_bytes": 0}, "turns.max_turn_bytes must be at least 1, not 0"),
        ({"max_total_bytes": -1}, "turns.max_total_bytes must be at least 1, not -1"),
        ({"max_answers": -1}, r"turns.max_answers must be at least 0 \(none are kept\), not -1"),
        ({"answer_ttl": float("nan")}, "turns.answer_ttl must be at least 0 seconds, not nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TurnsConfig(**fields)


async def test_a_kept_answer_holds_neither_its_prompt_nor_its_conversation(tiny_model):
    async with run_gateway(tiny_model, max_model_len=10**6) as gateway:

        async def ask(number):
            prompt = [{"role": "user", "content": f"{number}" + "x" * 20_000}]
            return await gateway.json(CHAT, {"messages": prompt}, headers={"Idempotency-Key": f"k{number}"})

        def forget():
            """All that others than the kept answers hold."""
            gateway.dispatcher.requests.clear()
            gateway.dispatcher.generations.clear()
            gateway.observer.records.clear()
            gateway.pipeline.watch.misses.log._sessions.clear()
            gateway.pipeline.keeper.store._records.clear()
            gateway.pipeline.keeper.store._by_name.clear()
            gc.collect()

        await ask("warm")
        forget()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(20):
                await ask(number)
            forget()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert taken < 800_000  # the prompts of twenty would be 400,000 characters and four times that in ids
        assert (await ask(19))["choices"][0]["message"]["content"] == "Hello there"
        assert gateway.dispatcher.requests == []
