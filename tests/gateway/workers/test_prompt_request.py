"""What goes on the wire for a prompt that is shared with its ledger."""

import msgspec
import pytest

from gateway.workers.foreign_client import prompt_ids
from gateway.workers.prompt_request import PromptRequest, prompt_of, wired
from gateway.workers.protocol import GenerateRequest, PromptPrefix, SamplingParams
from gateway.workers.sent_prompts import SentPrompts
from prefix_cache.hashing import pack_tokens
from prefix_cache.packed_tokens import PackedTokens

FIELDS = {"request_id": "r", "session": "s", "tenant": "t", "priority": 3, "sampling": SamplingParams(max_tokens=4)}


def encoded(request):
    return msgspec.msgpack.encode(request)


def test_it_is_written_as_a_generate_request_is():
    packed = pack_tokens(range(20_000))
    request, plain = PromptRequest(tokens=PackedTokens(packed), **FIELDS), GenerateRequest(packed_token_ids=packed, **FIELDS)
    assert encoded(wired(request)) == encoded(plain)
    assert wired(plain) is plain
    prefix = PromptPrefix(15_000, b"d" * 16)
    short = wired(request, prefix)
    assert encoded(short) == encoded(wired(plain, prefix))
    assert msgspec.msgpack.decode(encoded(short), type=GenerateRequest) == GenerateRequest(
        packed_token_ids=packed[60_000:], prefix=prefix, **FIELDS
    )
    assert wired(short) is short, "what was shortened stays so"
    assert prompt_ids(request) == prompt_ids(plain) == list(range(20_000))
    assert prompt_of(GenerateRequest(token_ids=[1], **FIELDS)) is None
    # Whoever forgets to wire it hears of it.
    with pytest.raises(TypeError, match="PackedTokens"):
        encoded(request)


def test_of_a_prompt_that_the_worker_knows_nothing_is_put_together(monkeypatch):
    """A session of many turns: each sends and hashes its own ids, and what the last part holds of those before."""
    sent, hashed = SentPrompts(), []
    tokens = PackedTokens(pack_tokens(range(100_000)))
    request = PromptRequest(tokens=tokens, **FIELDS)
    assert sent.shortened(request) is request
    sent.accepted(request)
    monkeypatch.setattr(PackedTokens, "whole", None)
    real = PackedTokens.digest

    def digest(self, count):
        before = len(self._states)
        got = real(self, count)
        hashed.append(sum(map(len, self.parts[before : len(self._states)])) + count * 4 % 32768)
        return got

    monkeypatch.setattr(PackedTokens, "digest", digest)
    for turn in range(1, 20):
        tokens = tokens.extended(len(tokens), (pack_tokens(range(1000 + turn)),))
        request = PromptRequest(tokens=tokens, **FIELDS)
        short = sent.shortened(request)
        assert short.prefix.tokens == len(tokens) - 1000 - turn
        assert short.packed_token_ids == pack_tokens(range(1000 + turn))
        sent.accepted(request)
    assert len(hashed) == 2 * 19
    assert max(hashed) <= 2 * 32768
    edited = tokens.extended(50_000, (pack_tokens(range(60_000)),))
    request = PromptRequest(tokens=edited, **FIELDS)
    assert sent.shortened(request) is request
