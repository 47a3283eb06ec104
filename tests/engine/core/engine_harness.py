"""Builds engines on tiny models and drives them to the end, checking the books after every step."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward import LayeredForward
from engine.kernels.reference import ReferenceAttention
from engine.sampling.sampler import Sampler
from gateway.workers.protocol import Done, Failed, Finished, GenerateRequest, SamplingParams, Started, Tokens

torch.set_num_threads(1)

EOS = 2
SCHEMA = (
    '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"object","properties":'
    '{"name":{"type":"string","maxLength":12},"ok":{"type":"boolean"},"list":{"type":"array","items":{"type":"integer"},'
    '"maxItems":4}},"required":["name","ok","list"],"additionalProperties":false}}}'
)
"""A grammar in which some tokens are forced, and some not."""


def make_engine(model, *, num_blocks=256, max_model_len=None, forward=None, sampler=None, **settings):
    names = ("grammars", "detokenizer", "drafters", "clock", "eviction", "graph_capture", "offload")
    extra = {name: settings.pop(name) for name in names if name in settings}
    # Who waits for whom is looked at by itself (test_session_scheduling.py).
    settings = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "policy": "fcfs"} | settings
    return Engine(
        EngineConfig(model=Path("tiny"), **settings),
        model,
        num_blocks=num_blocks,
        max_model_len=max_model_len or model.spec.max_position,
        forward=forward or LayeredForward(model.decoder, ReferenceAttention()),
        sampler=sampler or Sampler(model.spec.vocab_size),
        **extra,
    )


def wire(request_id, prompt, *, grammar=None, priority=0, cache_salt=None, **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=request_id,
        token_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        grammar=grammar,
        priority=priority,
        cache_salt=cache_salt,
    )


@dataclass
class Seen:
    """What came out for one request."""

    started: Started | None = None
    tokens: dict = field(default_factory=lambda: defaultdict(list))
    logprobs: dict = field(default_factory=lambda: defaultdict(list))
    finished: dict = field(default_factory=dict)
    done: Done | None = None
    failed: Failed | None = None

    def take(self, chunk):
        assert self.done is None, "a chunk came after Done"
        assert self.failed is None, "a chunk came after Failed"
        match chunk:
            case Started():
                assert self.started is None, "Started came twice"
                self.started = chunk
            case Tokens():
                assert self.started is not None, "a token came before Started"
                assert chunk.index not in self.finished, "a token came after Finished"
                self.tokens[chunk.index] += chunk.token_ids
                self.logprobs[chunk.index] += chunk.logprobs
            case Finished():
                assert chunk.index not in self.finished, "Finished came twice"
                self.finished[chunk.index] = chunk
            case Done():
                self.done = chunk
            case Failed():
                self.failed = chunk


class Driver:
    """An engine and all that came out of it."""

    def __init__(self, engine):
        self.engine = engine
        self.seen = defaultdict(Seen)

    def add(self, request_id, prompt, **settings):
        self.engine.add(self.engine.prepare(wire(request_id, prompt, **settings)))
        self.engine.check_integrity()

    def step(self):
        chunks = self.engine.step()
        self.engine.check_integrity()
        for request_id, chunk in chunks:
            self.seen[request_id].take(chunk)
        return chunks

    def run(self, max_steps=10_000):
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "the engine does not come to an end"
        self.assert_idle()
        return self.seen

    def assert_idle(self):
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.waiting_prompt_tokens) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, "blocks were lost"
        self.engine.check_integrity()


def generate(engine, prompt, **settings):
    """Tokens of each choice of one request that has the engine to itself."""
    driver = Driver(engine)
    driver.add("only", prompt, **settings)
    seen = driver.run()["only"]
    assert seen.failed is None, seen.failed
    return [seen.tokens[index] for index in range(settings.get("n", 1))]


def random_prompt(seed, length, vocab_size=320):
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
