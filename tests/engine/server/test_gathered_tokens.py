"""Tokens of an answer that nobody reads before its end come together, if its reader allows it."""

import asyncio

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_harness import Gated, decode_chunks, running, simulated, tokens_of

from engine.server.stream import RequestStream
from gateway.workers.protocol import Done, Finished, GenerateRequest, Started, Tokens

BODY = {
    "request_id": "r",
    "token_ids": list(range(10, 50)),
    "sampling": {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True},
}
STARTED, FINISHED, DONE = Started(3, 0, 0.0), Finished("length"), Done(3, 4, 0, 0.0, 0.0, 0.0, 0)


def opened(gather):
    return RequestStream(GenerateRequest(request_id="r", token_ids=[1], gather=gather), 0.0, lambda stream: None)


async def test_the_first_token_comes_at_once_and_the_rest_with_the_end():
    stream = opened(gather=1.0)
    for token in (5, 6):
        stream.push(STARTED if token == 5 else Tokens((token,)), 1.0)
    assert await stream.read() == [STARTED, Tokens((6,))]
    reading = asyncio.create_task(stream.read())
    for token in (7, 8, 9):
        stream.push(Tokens((token,)), 2.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not reading.done()
    for chunk in (FINISHED, DONE):
        stream.push(chunk, 3.0)
    assert await reading == [Tokens((7, 8, 9)), FINISHED, DONE]
    assert await stream.read() == []


async def test_started_waits_for_the_first_token_but_not_for_ever():
    stream = opened(gather=1.0)
    stream.push(STARTED, 1.0)
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.01)
    assert not reading.done()
    stream.push(Tokens((7,)), 2.0)
    assert await reading == [STARTED, Tokens((7,))]
    stream = opened(gather=0.01)
    stream.push(STARTED, 1.0)
    assert await stream.read() == [STARTED]
    stream.push(Tokens((7,)), 2.0)
    assert await stream.read() == [Tokens((7,))]
    stream.push(Tokens((8,)), 2.0)
    assert await stream.read() == [Tokens((8,))]


async def test_who_leaves_or_is_aborted_does_not_wait():
    for end in ("close", "abort"):
        stream = opened(gather=1.0)
        stream.push(STARTED, 1.0)
        stream.push(Tokens((7,)), 1.0)
        await stream.read()
        stream.push(Tokens((8,)), 1.0)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        if end == "close":
            await stream.aclose()
            assert await reading == [Tokens((8,))]
        else:
            stream.push_abort(2.0)
            assert (await reading)[:2] == [Tokens((8,)), Finished("abort")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=12), st.sampled_from([0.0, 0.001, 1.0]))
def test_nothing_is_lost_doubled_or_reordered(steps, gather):
    async def go():
        stream, got, expected = opened(gather), [], []

        async def read():
            while chunks := await stream.read():
                got.extend(token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.token_ids)
                ends.extend(chunk for chunk in chunks if not isinstance(chunk, Tokens))

        ends = []
        reading = asyncio.create_task(read())
        stream.push(STARTED, 0.0)
        for number, (count, pause) in enumerate(steps):
            ids = tuple(range(10 * number, 10 * number + count))
            expected.extend(ids)
            stream.push(Tokens(ids), 1.0)
            if pause:
                await asyncio.sleep(0.001)
        stream.push(FINISHED, 2.0)
        stream.push(DONE, 2.0)
        await reading
        assert got == expected
        assert ends == [STARTED, FINISHED, DONE]

    asyncio.run(go())


async def test_a_replica_writes_less_often_and_the_same_tokens():
    async with running(lambda: Gated(simulated(), permits=0)) as replica:
        replica.core.open()
        assert orjson.loads((await replica.get("/v1/info"))[1])["capabilities"]["gather"] is True
        plain = await replica.generate(BODY)
        async with replica.session.post(replica.url + "/v1/generate", json={**BODY, "gather": 1.0}) as response:
            gathered = decode_chunks(await response.read())
        assert tokens_of(gathered) == tokens_of(plain)
        assert len(tokens_of(plain)) == 12
        assert sum(isinstance(chunk, Tokens) for chunk in plain) > 2
        assert [type(chunk) for chunk in gathered] == [Started, Tokens, Tokens, Finished, Done]


async def test_seconds_that_are_none_are_refused_by_name():
    async with running(lambda: simulated()) as replica:
        for seconds in (-0.1, 1.5, "soon"):
            async with replica.session.post(replica.url + "/v1/generate", json={**BODY, "gather": seconds}) as response:
                assert response.status == 400
                assert "gather" in (await response.json())["error"]["field"]


async def test_the_end_of_an_answer_comes_with_its_last_chunk():
    """In one piece: a connection whose answer has not ended cannot take the next turn."""
    async with running(lambda: simulated()) as replica:
        host, port = replica.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps({**BODY, "gather": 1.0})
        head = f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        pieces = []
        while not pieces or not pieces[-1].endswith(b"0\r\n\r\n"):
            pieces.append(await reader.read(2**16))
        writer.close()
        assert b'"type":"done"' in pieces[-1]
