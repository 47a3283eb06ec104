"""Workers that answer garbage, too much, too little or nothing: a sensible error, a failure in the books, nothing that
hangs."""

import asyncio
import json
import tracemalloc

import msgspec
import pytest
from fake_replica import until
from raw_worker import CONTEXT, DROP, END, HANG, RawWorker, head, piece, whole

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import Prompt, SessionRef, TurnError
from gateway.workers.protocol import Done, Finished, SamplingParams, Started, TokenLogprob, Tokens
from prefix_cache.hashing import pack_tokens
from prefix_cache.packed_tokens import PackedTokens

PROMPT = 8


class Dialect:
    """How a kind of worker writes an answer."""

    def __init__(self, kind):
        self.kind = kind
        self.said = {}
        self.content = "application/x-ndjson" if kind == "turnkeep" else "text/event-stream"

    def start(self):
        return head(200, self.content)

    def begun(self):
        return piece(msgspec.json.encode(Started(PROMPT, 0, 0.0)) + b"\n") if self.kind == "turnkeep" else b""

    def tokens(self, ids, index=0, **more):
        if self.kind == "turnkeep":
            return piece(msgspec.json.encode(Tokens(tuple(ids), index, **more)) + b"\n")
        if self.kind == "sglang":
            said = self.said.setdefault(index, [])
            said += ids
            return self.event({"index": index, "output_ids": list(said), "meta_info": {"completion_tokens": len(said)}})
        return self.event({"choices": [{"index": index, "text": "", "token_ids": list(ids), **more}]})

    def finished(self, index=0):
        if self.kind == "turnkeep":
            return piece(msgspec.json.encode(Finished("stop", index)) + b"\n")
        if self.kind == "sglang":
            said = self.said.get(index, [])
            meta = {"completion_tokens": len(said), "finish_reason": {"type": "stop", "matched": 2}}
            return self.event({"index": index, "output_ids": list(said), "meta_info": meta})
        return self.event({"choices": [{"index": index, "text": "", "token_ids": [], "finish_reason": "stop"}]})

    def done(self):
        if self.kind == "turnkeep":
            return piece(msgspec.json.encode(Done(PROMPT, 1, 0, 0.0, 0.0, 0.0, 0)) + b"\n")
        return piece(b"data: [DONE]\n\n")

    def event(self, value):
        return piece(b"data: " + json.dumps(value).encode() + b"\n\n")

    def good(self, ids=(5,)):
        return [self.start(), self.begun(), self.tokens(ids), self.finished(), self.done(), END]


def endless_tokens(dialect):
    def pieces():
        while True:
            yield dialect.tokens([7] * 50)

    return pieces


def endless_line(dialect):
    def pieces():
        yield piece(b"data: " if dialect.kind != "turnkeep" else b'{"type":')
        while True:
            yield piece(b"x" * 60_000)

    return pieces


# name -> (script, what the sentence says). None of them may be taken for an answer.
BAD = {
    "garbage": (lambda d: [d.start(), piece(b"\x00\xff{{{\n\n" if d.kind == "turnkeep" else b"data: {{{\n\n"), END], ""),
    "garbage_after_tokens": (
        lambda d: [d.start(), d.begun(), d.tokens([1]), piece(b"[3]\n" if d.kind == "turnkeep" else b"data: [3]\n\n")],
        "",
    ),
    "not_http": (lambda d: [b"SSH-2.0-OpenSSH_9.2\r\n", DROP], ""),
    "hung_up": (lambda d: [DROP], ""),
    "chunk_cut_in_half": (lambda d: [d.start(), d.begun(), d.tokens([1]), b"ff\r\n" + b'{"ty', DROP], ""),
    "chunk_length_is_a_word": (lambda d: [d.start(), d.begun(), d.tokens([1]), b"many\r\n", HANG], ""),
    "too_short": (lambda d: [head(200, d.content, 5000), b"\n", DROP], ""),
    "ends_in_the_middle": (lambda d: [d.start(), d.begun(), d.tokens([1]), END], ""),
    "ends_before_it_begins": (lambda d: [d.start(), END], ""),
    "done_before_finished": (lambda d: [d.start(), d.begun(), d.tokens([1]), d.done(), END], ""),
    "strange_choice": (lambda d: [d.start(), d.begun(), d.tokens([1], index=3)], "choice 3"),
    "negative_choice": (lambda d: [d.start(), d.begun(), d.tokens([1], index=-1)], "choice -1"),
    "token_outside": (lambda d: [d.start(), d.begun(), d.tokens([2**40])], "vocabulary"),
    "endless_tokens": (lambda d: [d.start(), d.begun(), endless_tokens(d)], "more than"),
    "empty_200": (lambda d: [whole(b"")], ""),
    "error_body_with_200": (lambda d: [whole(b'{"error":{"message":"I am on fire","code":500}}')], ""),
    "html_with_200": (lambda d: [whole(b"<html>login</html>", kind="text/html")], ""),
    "html_with_502": (lambda d: [whole(b"<html>bad gateway</html>", 502, "text/html")], "bad gateway"),
    "redirect": (lambda d: [whole(b"", 302)], ""),
    "not_found": (lambda d: [whole(b"no such route", 404)], "no such route"),
    "unauthorised": (lambda d: [whole(b'{"error":{"code":"x","message":"a key is needed"}}', 401)], "key is needed"),
}
BAD_VLLM = {
    "error_in_the_stream": (
        lambda d: [d.start(), d.event({"error": {"message": "I am on fire", "code": 500}}), END],
        "I am on fire",
    ),
    "error_after_tokens": (
        lambda d: [d.start(), d.tokens([1]), d.event({"error": {"message": "on fire", "code": 500}}), END],
        "on fire",
    ),
    "no_token_ids": (lambda d: [d.start(), d.event({"choices": [{"index": 0, "text": "hi"}]})], "without token ids"),
    "another_prompt": (
        lambda d: [d.start(), d.event({"choices": [{"index": 0, "token_ids": [1], "prompt_token_ids": [9]}]})],
        "another prompt",
    ),
    "logprobs_of_another_length": (
        lambda d: [d.start(), d.tokens([1, 2], logprobs={"tokens": ["token_id:1"], "token_logprobs": [-1.0]})],
        "logprobs",
    ),
    "strange_reason": (
        lambda d: [d.start(), d.event({"choices": [{"token_ids": [1], "finish_reason": "boredom"}]})],
        "boredom",
    ),
}
BAD_TURNKEEP = {
    "logprobs_of_another_length": (
        lambda d: [d.start(), d.begun(), d.tokens([1, 2], logprobs=(TokenLogprob(1, -1.0),))],
        "log-probabilities",
    ),
    "unknown_chunk": (lambda d: [d.start(), d.begun(), piece(b'{"type":"surprise"}\n')], ""),
}
BAD_SGLANG = {
    "error_after_tokens": (lambda d: [d.start(), d.tokens([1]), d.event({"error": {"message": "on fire"}}), END], "on fire"),
    "miscounted": (
        lambda d: [d.start(), d.event({"output_ids": [1, 2], "meta_info": {"completion_tokens": 7}})],
        "counts 7 tokens",
    ),
    "tokens_taken_back": (
        lambda d: [d.start(), d.tokens([1, 2]), d.event({"output_ids": [1], "meta_info": {"completion_tokens": 1}})],
        "takes tokens back",
    ),
    "no_meta": (lambda d: [d.start(), d.event({"output_ids": [1]})], "without meta_info"),
    "aborted_by_the_server": (
        lambda d: [
            d.start(),
            d.event(
                {
                    "output_ids": [],
                    "meta_info": {
                        "completion_tokens": 0,
                        "finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500},
                    },
                }
            ),
        ],
        "out of memory",
    ),
    "foreign_logprobs": (
        lambda d: [
            d.start(),
            d.event({"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 9, None]]}}),
        ],
        "logprobs",
    ),
}
CASES = [(kind, name, *case) for kind in ("turnkeep", "vllm", "sglang") for name, case in BAD.items()]
CASES += [("vllm", name, *case) for name, case in BAD_VLLM.items()]
CASES += [("sglang", name, *case) for name, case in BAD_SGLANG.items()]
CASES += [("turnkeep", name, *case) for name, case in BAD_TURNKEEP.items()]


@pytest.fixture
async def dispatcher():
    config = PoolConfig(models=("m",), poll_interval=0.02, probe_timeout=2.0, max_attempts=2, max_migrations=0)
    async with PoolDispatcher(config) as made:
        yield made


async def join(dispatcher, name, worker):
    dispatcher.add_worker(name, worker.spec)
    await until(lambda: dispatcher.pool.member(name).state.value == "ready")
    return dispatcher.pool.member(name)


async def ask(dispatcher, **sampling):
    generation = await dispatcher.dispatch(
        request_id="r",
        model="m",
        session=SessionRef("t", "s"),
        prompt=Prompt(PackedTokens(pack_tokens(range(PROMPT))), ()),
        sampling=SamplingParams(**{"max_tokens": 500, **sampling}),
        priority=0,
        trace_headers={},
    )
    try:
        return [chunk async for chunk in generation.chunks()]
    finally:
        await generation.aclose()


@pytest.mark.parametrize(("kind", "name", "script", "says"), CASES, ids=[f"{kind}-{name}" for kind, name, *_ in CASES])
async def test_every_bad_answer_is_an_error_and_opens_the_breaker(dispatcher, kind, name, script, says):
    async with RawWorker(kind, script(Dialect(kind))) as worker:
        member = await join(dispatcher, "w", worker)
        for attempt in range(1, member.breaker.threshold + 1):
            with pytest.raises(TurnError) as caught:
                async with asyncio.timeout(10):
                    await ask(dispatcher)
            assert caught.value.status in (502, 503), caught.value.message
            assert says in caught.value.message
            assert member.breaker.failures == attempt
            assert (member.books.requests, len(member.streams)) == (0, 0)
        assert not member.available
        posts = worker.posts
        with pytest.raises(TurnError) as caught:
            await ask(dispatcher)
        assert (caught.value.status, worker.posts) == (503, posts)


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_what_fails_before_its_first_chunk_is_answered_by_another(dispatcher, kind):
    dialect = Dialect(kind)
    async with RawWorker(kind, BAD["garbage"][0](dialect)) as bad, RawWorker(kind, dialect.good()) as good:
        members = [await join(dispatcher, name, worker) for name, worker in (("bad", bad), ("good", good))]
        for _ in range(6):
            chunks = await ask(dispatcher)
            assert [chunk.token_ids for chunk in chunks if isinstance(chunk, Tokens)] == [(5,)]
        assert bad.posts >= 1
        assert [member.breaker.failures for member in members] == [bad.posts, 0]
        assert good.posts == 6


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_what_comes_after_the_end_is_no_part_of_the_answer(dispatcher, kind):
    """It was complete by then; but a worker that does so is none to be trusted."""
    d = Dialect(kind)
    script = [d.start(), d.begun(), d.tokens([1]), d.finished(), d.tokens([2]), d.done(), END]
    async with RawWorker(kind, script) as worker:
        member = await join(dispatcher, "w", worker)
        chunks = await ask(dispatcher)
        assert [type(chunk) for chunk in chunks] == [Tokens, Finished, Done]
        assert chunks[0].token_ids == (1,)
        assert member.breaker.failures == 1


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_a_good_answer_forgives(dispatcher, kind):
    dialect = Dialect(kind)
    async with RawWorker(kind, BAD["done_before_finished"][0](dialect)) as worker:
        member = await join(dispatcher, "w", worker)
        for _ in range(2):
            with pytest.raises(TurnError):
                await ask(dispatcher)
        assert member.breaker.failures == 2
        worker.script = dialect.good()
        await ask(dispatcher)
        assert member.breaker.failures == 0


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_an_endless_stream_is_cut_where_the_context_ends(dispatcher, kind):
    """Also where the client set no limit. The worker is left, and what it sent beyond is not kept."""
    dialect = Dialect(kind)
    async with RawWorker(kind, [dialect.start(), dialect.begun(), endless_tokens(dialect)]) as worker:
        await join(dispatcher, "w", worker)
        with pytest.raises(TurnError, match=f"context of {CONTEXT} tokens"):
            async with asyncio.timeout(10):
                await ask(dispatcher, max_tokens=None)
        async with asyncio.timeout(10):
            await worker.left.wait()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_line_without_an_end_is_cut(dispatcher, kind):
    dialect = Dialect(kind)
    async with RawWorker(kind, [dialect.start(), endless_line(dialect)]) as worker:
        await join(dispatcher, "w", worker)
        tracemalloc.start()
        try:
            with pytest.raises(TurnError, match="longer than"):
                async with asyncio.timeout(30):
                    await ask(dispatcher)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 * 2**20
        assert worker.sent < 64 * 2**20


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_a_worker_that_comes_back_with_another_model_gets_no_more_turns(dispatcher, kind):
    dialect = Dialect(kind)
    async with RawWorker(kind, dialect.good()) as worker:
        member = await join(dispatcher, "w", worker)
        await ask(dispatcher)
        worker.model, worker.life = "another", "2"
        await until(lambda: member.state.value == "mismatched")
        assert "'another'" in member.detail
        with pytest.raises(TurnError) as caught:
            await ask(dispatcher)
        assert caught.value.status == 503
        assert worker.posts == 1
        worker.model, worker.life = "m", "3"
        await until(lambda: member.state.value == "ready")
        assert len(await ask(dispatcher)) == 3


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
async def test_a_client_that_leaves_hangs_up_on_a_worker_that_says_nothing(dispatcher, kind):
    async with RawWorker(kind, [Dialect(kind).start(), HANG]) as worker:
        member = await join(dispatcher, "w", worker)
        turn = asyncio.create_task(ask(dispatcher))
        await until(lambda: worker.posts == 1)
        turn.cancel()
        async with asyncio.timeout(5):
            await worker.left.wait()
        await asyncio.gather(turn, return_exceptions=True)
        assert member.books.requests == 0
