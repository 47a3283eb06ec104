import asyncio
import socket

import orjson
import pytest
from fake_dispatcher import FakeGeneration, Script
from gateway_harness import run_gateway

USER = [{"role": "user", "content": "hi"}]


async def raw_post(gateway, body, *, receive_buffer=None):
    host, port = gateway.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    data = orjson.dumps(body)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    return reader, writer


async def until(condition):
    """Looks again on every turn of the loop."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing tells a test of it
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_its_generation_at_once(gateway, stream, phase):
    never = asyncio.Event()
    gateway.dispatcher.script = Script(gate=never) if phase == "prefill" else Script(pause=(3, never))
    _reader, writer = await raw_post(gateway, {"messages": USER, "stream": stream})
    await until(lambda: gateway.dispatcher.generations)
    generation = gateway.dispatcher.generations[0]
    if phase == "decode":
        await until(lambda: generation.taken >= 3)
    assert not generation.closed
    writer.close()
    await asyncio.wait_for(gateway.dispatcher.closed.wait(), 1)
    [record] = await gateway.observer.wait(1)
    assert (record.status, record.response) == (499, None)
    assert record.error
    assert record.completion_tokens == (3 if phase == "decode" else 0)
    assert b'status="499"' in gateway.telemetry.render_metrics()


async def test_a_client_that_stops_reading_is_held_in_bounds_and_dropped(tiny_model):
    async with run_gateway(tiny_model, write_timeout=0.5, max_model_len=10**7) as gateway:
        gateway.dispatcher.script = Script("x" * 1000, cut=10, repeat=300)
        reader, writer = await raw_post(gateway, {"messages": USER, "stream": True}, receive_buffer=4096)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await asyncio.wait_for(gateway.dispatcher.closed.wait(), 60)
        [record] = await gateway.observer.wait(1)
        assert record.status == 499
        assert "read nothing for 0.5 seconds" in record.error
        # What was taken from the worker is what the buffers hold, far from all of it.
        assert gateway.dispatcher.generations[0].taken < 250_000
        writer.close()
        gateway.dispatcher.script = Script()
        await gateway.chat()


async def test_a_slow_reader_gets_everything(tiny_model):
    async with run_gateway(tiny_model, write_timeout=5, max_model_len=10**7) as gateway:
        gateway.dispatcher.script = Script("x" * 1000, cut=50, repeat=20)
        reader, writer = await raw_post(gateway, {"messages": USER, "stream": True}, receive_buffer=4096)
        received = b""
        while b"[DONE]" not in received:
            received += await reader.read(16_384)
            await asyncio.sleep(0.001)
        assert received.count(b'"content":"' + b"x" * 50 + b'"') == 400
        writer.close()


async def test_shutting_down_lets_streams_end(tiny_model):
    pause = asyncio.Event()
    async with run_gateway(tiny_model, shutdown_timeout=5) as gateway:
        gateway.dispatcher.script = Script(pause=(3, pause))
        response = await gateway.http.post(gateway.url + "/v1/chat/completions", json={"messages": USER, "stream": True})
        asyncio.get_running_loop().call_later(0.2, pause.set)
        read = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        text = (await read).decode()
    assert "[DONE]" in text


async def test_every_prompt_of_a_request_is_ended(gateway):
    gateway.dispatcher.script = Script(gate=asyncio.Event())
    task = asyncio.create_task(gateway.json("/v1/completions", {"prompt": ["a", "b", "c"]}))
    await until(lambda: len(gateway.dispatcher.generations) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gateway.observer.wait(1)
    assert all(generation.closed for generation in gateway.dispatcher.generations)


async def test_a_client_that_hangs_up_after_the_last_event_was_served(gateway, monkeypatch):
    closing, never = asyncio.Event(), asyncio.Event()
    aclose = FakeGeneration.aclose

    async def lingering(generation):
        closing.set()
        try:
            await never.wait()  # the client's hanging up finds the handler still at it
        finally:
            await aclose(generation)

    monkeypatch.setattr(FakeGeneration, "aclose", lingering)
    gateway.dispatcher.script = Script("All said.")
    reader, writer = await raw_post(gateway, {"messages": USER, "stream": True})
    await reader.readuntil(b"data: [DONE]\n\n")
    await asyncio.wait_for(closing.wait(), 5)
    writer.close()
    [record] = await gateway.observer.wait(1)
    assert record.status == 200
    assert record.error is None
    assert record.response["choices"][0]["message"]["content"] == "All said."
    assert record.finish_reason == "stop"
    assert b'status="499"' not in gateway.telemetry.render_metrics()
    never.set()
    await until(lambda: gateway.dispatcher.open == 0)
