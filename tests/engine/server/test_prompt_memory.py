"""Prompts by their new part alone: what a replica remembers, and what it says of what it does not."""

from contextlib import suppress

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_harness import running, simulated

from engine.core import RequestRefused
from engine.server.prompt_memory import PromptMemory
from gateway.workers.protocol import GenerateRequest, PromptPrefix, SamplingParams
from gateway.workers.replica import ReplicaClient
from gateway.workers.sent_prompts import SentPrompts

LONG = 1024


def request(packed, session="s", tenant="", prefix=None):
    return GenerateRequest(request_id="r", packed_token_ids=packed, session=session, tenant=tenant, prefix=prefix)


def tokens(count, seed=0):
    return b"".join((seed + number).to_bytes(4, "little") for number in range(count))


def test_a_turn_that_goes_on_sends_what_is_new():
    sent, memory = SentPrompts(), PromptMemory(10**6)
    first = request(tokens(LONG))
    assert sent.shortened(first) is first
    assert memory.whole(first) is first
    sent.accepted(first)
    second = request(tokens(LONG + 10))
    short = sent.shortened(second)
    assert short.packed_token_ids == tokens(LONG + 10)[4 * LONG :]
    assert short.prefix == PromptPrefix(LONG, xxhash.xxh3_128_digest(tokens(LONG)))
    assert memory.whole(short) == second
    assert (len(memory), memory.held_bytes) == (1, 4 * (LONG + 10))


def test_what_is_not_remembered_is_refused_and_changes_nothing():
    memory = PromptMemory(10**6)
    memory.whole(request(tokens(LONG)))
    known = xxhash.xxh3_128_digest(tokens(LONG))
    for prefix in (PromptPrefix(LONG, b"x" * 16), PromptPrefix(LONG - 1, known)):
        with pytest.raises(RequestRefused) as refused:
            memory.whole(request(tokens(3), prefix=prefix))
        assert refused.value.code == "unknown_prefix"
    assert (len(memory), memory.held_bytes) == (1, 4 * LONG)
    assert memory.whole(request(b"", prefix=PromptPrefix(LONG, known))).packed_token_ids == tokens(LONG)
    with pytest.raises(RequestRefused, match="goes with packed_token_ids"):
        memory.whole(GenerateRequest(request_id="r", token_ids=[1], prefix=PromptPrefix(LONG, known)))


def test_no_tenant_is_given_what_another_sent():
    """Whoever finds a prompt with the digest of somebody else's must not get into their conversation."""
    memory = PromptMemory(10**6)
    memory.whole(request(tokens(LONG), tenant="a"))
    prefix = PromptPrefix(LONG, xxhash.xxh3_128_digest(tokens(LONG)))
    with pytest.raises(RequestRefused) as refused:
        memory.whole(request(tokens(3), tenant="b", prefix=prefix))
    assert refused.value.code == "unknown_prefix"
    memory.whole(request(tokens(LONG), tenant="b"))
    assert (len(memory), memory.held_bytes) == (2, 2 * 4 * LONG)
    assert memory.whole(request(b"", tenant="a", prefix=prefix)).packed_token_ids == tokens(LONG)


def test_short_and_anonymous_prompts_are_not_remembered():
    memory, sent = PromptMemory(10**6), SentPrompts()
    for one in (request(tokens(LONG - 1)), request(tokens(LONG), session=None)):
        memory.whole(one)
        sent.accepted(one)
    assert (len(memory), len(sent)) == (0, 0)


def test_both_are_bounded():
    memory, sent = PromptMemory(4 * LONG * 3), SentPrompts(capacity=5)
    for number in range(20):
        one = request(tokens(LONG, seed=number), session=str(number))
        memory.whole(one)
        sent.accepted(one)
    assert (len(memory), memory.held_bytes, len(sent)) == (3, 4 * LONG * 3, 5)
    memory.whole(request(tokens(4 * LONG)))
    assert len(memory) == 3


turns = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["", "t"]), st.integers(0, 3), st.integers(0, 40), st.booleans()),
    max_size=40,
)


@settings(deadline=None)
@given(turns, st.integers(2, 8))
def test_whatever_is_forgotten_the_worker_computes_the_very_prompt(plan, room):
    """Sessions that go on, are cut, change and come from two tenants; a worker that forgets much and restarts."""
    memory, sent = PromptMemory(4 * LONG * room), SentPrompts(capacity=2)
    prompts = {}
    for session, tenant, cut, more, restarted in plan:
        if restarted:
            memory = PromptMemory(4 * LONG * room)
        before = prompts.get((session, tenant), tokens(LONG))
        packed = before[: len(before) - 4 * cut] + tokens(more, seed=7)
        whole = request(packed, session, tenant)
        short = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.shortened(whole)), type=GenerateRequest)
        arrived = whole
        with suppress(RequestRefused):
            arrived = memory.whole(short)
        if arrived is whole:
            sent.forgotten(whole)
            arrived = memory.whole(whole)
        assert arrived == whole
        sent.accepted(whole)
        prompts[(session, tenant)] = packed
        assert memory.held_bytes <= 4 * LONG * room


async def test_over_sockets_a_replica_that_forgot_is_sent_the_whole_prompt():
    """The real client: what it sends is short, and after the replica has forgotten the same turn still runs."""
    async with running(lambda: simulated(max_model_len=8192, num_blocks=1024, vocab_size=100_000)) as replica:
        client = ReplicaClient(replica.url)
        try:
            await client.info()
            sizes = []
            for turn, forget in enumerate((False, False, True)):
                if forget:
                    await client.generate(request(tokens(LONG, seed=99), session="other"), {})
                    client._sent._sent["", "s"] = PromptPrefix(LONG, xxhash.xxh3_128_digest(tokens(LONG)))
                wanted = msgspec.structs.replace(
                    request(tokens(LONG + 100 * turn)),
                    request_id=f"r{turn}",
                    sampling=SamplingParams(max_tokens=2, ignore_eos=True),
                )
                sizes.append(len(client._sent.shortened(wanted).packed_token_ids))
                chunks = [chunk async for chunk in await client.generate(wanted, {})]
                assert chunks[-1].prompt_tokens == LONG + 100 * turn
                assert chunks[-1].cached_tokens == (LONG + 100 * (turn - 1)) // 16 * 16 * (turn > 0)
            # The last one named a beginning that a longer one had replaced.
            assert sizes == [4 * LONG, 400, 800]
        finally:
            await client.aclose()
