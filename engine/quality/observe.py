"""What a model says about a text: computed by the engine's own forward pass, in chunks over paged KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.forward import Forward
from engine.kernels.interface import StepBatch
from engine.quality.config import QualityConfig

Progress = Callable[[int, int], None]
"""Takes tokens done and tokens in all."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One model over N positions that a token follows.

    surprise: float64 [N], -log probability of the token that follows, in nats; choices: int64 [N], the likeliest tokens;
    logits: float32 [S, vocabulary] of evenly spread positions; decoded: the same of positions that were computed one at a
    time, what follows being known; generated: the greedy continuations of the prompts.
    """

    surprise: torch.Tensor
    choices: torch.Tensor
    logits: torch.Tensor
    decoded: torch.Tensor
    generated: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise."""
        return float(self.surprise.mean().exp())


@dataclass(frozen=True, slots=True)
class Subject:
    """A model ready to run one sequence: kv holds at least as many blocks as its longest context takes."""

    forward: Forward
    kv: torch.Tensor
    block_size: int


def tokens_of_work(texts: Sequence[Sequence[int]], config: QualityConfig) -> int:
    """How many tokens `observe` computes."""
    return sum(map(len, texts)) + sum(len(part) + config.generated_tokens for part in _prompts(texts, config))


@torch.inference_mode()
def observe(subject: Subject, texts: Sequence[Sequence[int]], config: QualityConfig, progress: Progress) -> Observation:
    """Reads every text (token ids, at least two) in chunks, what follows being known; then parts of them again, one token at a
    time after a prompt; and continues the prompts greedily."""
    total, done = tokens_of_work(texts, config), 0
    positions = sum(len(text) - 1 for text in texts)
    stride = max(1, -(-positions // config.sampled_rows))
    surprise, choices, sampled = [], [], []
    seen = 0
    for text in texts:
        ids = torch.tensor(text, dtype=torch.int64)
        for start in range(0, len(text) - 1, config.chunk):
            stop = min(start + config.chunk, len(text) - 1)
            logits = _run(subject, ids[start:stop], start, range(stop - start))
            follows = ids[start + 1 : stop + 1]
            chosen = logits.gather(1, follows[:, None])[:, 0]
            surprise.append((torch.logsumexp(logits, -1) - chosen).double())
            choices.append(logits.argmax(-1))
            sampled.append(logits[(-seen) % stride :: stride].clone())
            seen += stop - start
            done += stop - start
            progress(done, total)
        done += 1
    generated: list[tuple[int, ...]] = []
    decoded: list[torch.Tensor] = []
    for part in _prompts(texts, config):
        prompt, known = part[: config.prompt_tokens], part[config.prompt_tokens :]
        first = _run(subject, torch.tensor(prompt, dtype=torch.int64), 0, [len(prompt) - 1])
        decoded.extend(_step(subject, token, position) for position, token in enumerate(known, len(prompt)))
        # The KV of the prompt stays as it is; what was read beyond it is written over.
        generated.append(_continue(subject, first, len(prompt), config.generated_tokens))
        done += len(part) + config.generated_tokens
        progress(done, total)
    logits = torch.cat(sampled)
    rows = torch.cat(decoded) if decoded else logits[:0]
    return Observation(torch.cat(surprise), torch.cat(choices), logits, rows, tuple(generated))


def _prompts(texts: Sequence[Sequence[int]], config: QualityConfig) -> list[Sequence[int]]:
    """Prompts with what follows them: beginnings of the texts, and where there are too few of those, later parts of them."""
    size = config.prompt_tokens + config.generated_tokens
    places = [text[start : start + size] for start in (0, 4 * size, 8 * size) for text in texts]
    return [place for place in places if len(place) == size][: config.prompts]


def _continue(subject: Subject, logits: torch.Tensor, position: int, count: int) -> tuple[int, ...]:
    """`count` tokens chosen greedily from `position` on, of which `logits` [1, vocabulary] choose the first."""
    chosen: list[int] = []
    while True:
        chosen.append(int(logits[0].argmax()))
        if len(chosen) == count:
            return tuple(chosen)
        logits = _step(subject, chosen[-1], position + len(chosen) - 1)


def _step(subject: Subject, token: int, position: int) -> torch.Tensor:
    return _run(subject, torch.tensor([token], dtype=torch.int64), position, [0])


def _run(subject: Subject, ids: torch.Tensor, start: int, rows: Sequence[int]) -> torch.Tensor:
    """The logits that follow `rows` of the tokens `ids`, which stand at the positions from `start` on of the one sequence."""
    count = len(ids)
    stop = start + count
    positions = torch.arange(start, stop)
    batch = StepBatch(
        token_ids=ids,
        positions=positions,
        slots=positions,  # block b of the sequence is block b of the memory
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([stop], dtype=torch.int32),
        block_tables=torch.arange(-(-stop // subject.block_size), dtype=torch.int32).unsqueeze(0),
        query_start_list=(0, count),
        context_lens_list=(stop,),
    )
    return subject.forward.run(batch, subject.kv, rows)
