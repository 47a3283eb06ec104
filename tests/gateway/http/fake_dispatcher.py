"""A dispatcher that answers from a script, and a tiny model directory, for tests of the HTTP front."""

import asyncio
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.turn import Receipt, TurnError
from gateway.workers.protocol import Done, Finished, Started, TokenLogprob, Tokens, WorkerInfo
from prefix_cache.hashing import pack_tokens, unpack_tokens
from prefix_cache.packed_tokens import PackedTokens

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = "<|im_end|>"
ALL = 10**6


def write_model(directory: Path, *, template: str | None = CHATML, adds_bos: bool = False) -> Path:
    """A byte-level tokenizer without merges (one token a byte) and a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", EOS)])
    if adds_bos:
        bos = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": EOS, "pad_token": EOS, "unk_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@dataclass
class Script:
    """What the fake worker does with a request. `cut` tokens a chunk; `gate` is waited for before it starts, `pause` before
    the token of that number; `error` is raised on dispatch, `late_error` before `Done`."""

    text: str = "Hello there"
    cut: int = 1
    cached: int = 3
    finish: str | None = None
    gate: asyncio.Event | None = None
    pause: tuple[int, asyncio.Event] | None = None
    error: TurnError | None = None
    late_error: Exception | None = None
    repeat: int = 1
    finish_index: int = 0


@dataclass
class FakeGeneration:
    dispatcher: "FakeDispatcher"
    script: Script
    request: dict
    receipt: Receipt = field(default_factory=lambda: Receipt("replica-0", "prefix", 0, 1))
    closed: bool = False
    taken: int = 0
    migrations: tuple = ()

    @functools.cached_property
    def cached(self):
        """For a script that says ALL what was computed before; the last token always is computed anew."""
        if self.script.cached < ALL:
            return self.script.cached
        prompt = self.request["prompt"]
        shared = max((prompt.tokens.common(PackedTokens(one)) for one in self.dispatcher.computed), default=0)
        return min(shared, prompt.num_tokens - 1)

    async def started(self):
        if self.script.gate is not None:
            await self.script.gate.wait()
        return Started(self.request["prompt"].num_tokens, self.cached, 0.0)

    async def chunks(self):
        await self.started()
        sampling = self.request["sampling"]
        eos = self.dispatcher.tokenizer.token_to_id(EOS)
        ids = self.dispatcher.tokenizer.encode(self.script.text * self.script.repeat, add_special_tokens=False).ids
        limit = sampling.max_tokens if sampling.max_tokens is not None else 10**9
        cut_short = len(ids) + 1 > limit
        ids = [*ids, eos][:limit]
        if self.dispatcher.remembers:
            self.dispatcher.computed.append(self.request["prompt"].packed_token_ids + pack_tokens(ids))
        stop = next((text for text in sampling.stop if text in self.script.text), None)
        for start in range(0, len(ids), self.script.cut):
            if self.script.pause is not None and self.script.pause[0] <= start:
                await self.script.pause[1].wait()
            part = tuple(ids[start : start + self.script.cut])
            for index in range(sampling.n):
                self.taken += len(part)
                yield Tokens(part, index, self._logprobs(part, sampling.logprobs))
            await asyncio.sleep(0)
        if self.script.late_error is not None:
            raise self.script.late_error
        reason = self.script.finish or ("length" if cut_short else "stop")
        for index in range(sampling.n):
            yield Finished(reason, index + self.script.finish_index, stop if reason == "stop" else None)
        yield Done(self.request["prompt"].num_tokens, len(ids) * sampling.n, self.cached, 0.0, 0.1, 0.1, 0)

    def _logprobs(self, ids, top):
        if top is None:
            return ()
        return tuple(TokenLogprob(i, -0.5, tuple((i + k, -0.5 - k) for k in range(top))) for i in ids)

    async def aclose(self):
        if not self.closed:
            self.closed = True
            self.dispatcher.open -= 1
            self.dispatcher.closed.set()


class FakeDispatcher:
    """Answers every request by `script`; keeps what it was asked in `requests`."""

    def __init__(self, directory: Path, *, names=("tiny",), max_model_len=2048):
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.script = Script()
        self.requests: list[dict] = []
        self.remembers = False
        self.computed: list[bytes] = []
        self.superseded: list[tuple[str, bytes]] = []
        self.retained: list[tuple[str, object]] = []
        self.generations: list[FakeGeneration] = []
        self.open = 0
        self.closed = asyncio.Event()
        self.asked = asyncio.Event()
        self.up = True
        self._names = names
        self._info = WorkerInfo(
            protocol_version=1,
            instance="i",
            model=names[0],
            namespace="00" * 16,
            block_size=16,
            num_blocks=1000,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.get_vocab_size(),
            max_concurrency=8,
        )

    async def wait_for(self, count):
        """Until so many requests have come."""
        async with asyncio.timeout(5):
            while len(self.requests) < count:
                self.asked.clear()
                await self.asked.wait()

    async def dispatch(self, **request):
        self.requests.append(request)
        self.asked.set()
        if self.script.error is not None:
            raise self.script.error
        generation = FakeGeneration(self, self.script, request)
        self.generations.append(generation)
        self.open += 1
        return generation

    def pool_info(self, model):
        if not self.up:
            raise TurnError(503, "no_worker", "No worker of 'tiny' is up yet. Try again shortly.", retry_after=1.0)
        return self._info

    def models(self):
        return self._names

    def residency(self, digests):
        return {"replica-0": len(digests)}

    def retain(self, worker, hint):
        self.retained.append((worker, hint))

    def supersede(self, model, digests):
        self.superseded.append((model, digests))

    def prompt_tokens(self, position=-1):
        return self.requests[position]["prompt"].num_tokens

    def prompt_text(self, position=-1):
        ids = unpack_tokens(self.requests[position]["prompt"].packed_token_ids).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class FakeObserver:
    """Keeps the records; a turn's comes right after its answer."""

    def __init__(self):
        self.records = []
        self._heard = asyncio.Event()

    def turn_finished(self, record):
        self.records.append(record)
        self._heard.set()

    async def wait(self, count):
        async with asyncio.timeout(5):
            while len(self.records) < count:
                self._heard.clear()
                await self._heard.wait()
        return self.records
