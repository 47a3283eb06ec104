"""Tool-call turns of the bundled trajectories, with forced and guessed tokens and with a pass for every token: passes and time.

    python -m tests.benchmarks.bench_speculation [--turns 52] [--dtype float32] [--draft 8] [--temperature 0] [--batch 16]

The embedded model answers each turn that was answered with a call, under the tools' grammar, from the recorded history. Two
gateways with a replica each stand side by side, and every turn is asked of both, one after the other, so that both meet the
machine as it is. The plain side guesses nothing and is asked for log-probabilities, for which every token takes a pass. Printed
are forward passes for each generated token and seconds of decoding, trace by trace, and whether all texts are the same.

Then --batch generations of free text at once, on one engine after the other: beyond --max-draft-batch nothing is guessed, so
that they should be as fast as without guesses; what it would be without that switch stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_engine
from gateway.workers.protocol import GenerateRequest, SamplingParams
from traces.index import expand_paths, index_files

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_gateway import serve

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
SIDES = ("plain", "guessing")


@dataclass
class Figures:
    """What one side did."""

    turns: int = 0
    tokens: float = 0
    passes: float = 0
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, before: dict[str, Any], after: dict[str, Any], seconds: float) -> None:
        """The first token of each answer comes from its prompt's pass, which counts as one."""
        self.turns += 1
        self.tokens += after["generated_tokens_total"] - before["generated_tokens_total"]
        self.passes += 1 + after.get("decode_passes_total", 0) - before.get("decode_passes_total", 0)
        self.seconds += seconds
        for name in ("drafted", "accepted", "forced"):
            self.counts[name] += after.get(f"{name}_tokens_total", 0) - before.get(f"{name}_tokens_total", 0)

    @property
    def each(self) -> float:
        return self.passes / self.tokens


def turns(limit: int) -> list[tuple[str, dict[str, Any]]]:
    """Trace and request of turns that were answered with calls: the first ones of every trace, about `limit` in all."""
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in index_files(expand_paths([BUNDLED])):
        for turn in entry.read():
            if turn.line.assistant.get("tool_calls"):
                request = {"messages": turn.messages, "tools": list(turn.tools), "tool_choice": "required"}
                traces[turn.line.session].append(request)
    most = -(-limit // len(traces)) if limit else None
    return [(trace, request) for trace, requests in traces.items() for request in requests[:most]]


class Side:
    """A gateway and its replica."""

    def __init__(self, stack: ExitStack, draft: int, dtype: str, *, plain: bool) -> None:
        options = ("--engine", f"max-draft-tokens={draft}", "--engine", "num-blocks=3000", "--dtype", dtype)
        self.url = stack.enter_context(serve(*options, "--replicas", 1, "--log-level", "warning")).url
        self._client = stack.enter_context(httpx2.Client(base_url=self.url, timeout=600))
        address = self._client.get("/workers").json()["data"][0]["url"]
        uds = address.removeprefix("unix:") if address.startswith("unix:") else None
        transport = httpx2.HTTPTransport(uds=uds) if uds else None
        self._replica = stack.enter_context(
            httpx2.Client(base_url="http://replica" if uds else address, transport=transport, timeout=30)
        )
        self._plain = plain

    def stats(self) -> dict[str, Any]:
        return self._replica.get("/v1/stats").json()

    def ask(self, request: dict[str, Any], temperature: float) -> tuple[Any, float]:
        """The answer, and seconds from its first token to its last."""
        body = {**request, "temperature": temperature, "seed": 1, "max_tokens": 128, "stream": True}
        if self._plain:
            body["logprobs"] = True
        calls: dict[int, list[str]] = defaultdict(lambda: ["", ""])
        text, first, last = "", None, 0.0
        with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    delta = choice["delta"]
                    text += delta.get("content") or ""
                    for call in delta.get("tool_calls") or ():
                        calls[call["index"]][0] += call["function"].get("name") or ""
                        calls[call["index"]][1] += call["function"].get("arguments") or ""
                last = time.perf_counter()
                first = last if first is None else first
        return (text, sorted(calls.items())), last - (first or last)


def together(engine: Engine, prompts: list[list[int]], number: int) -> tuple[float, float, int]:
    """Tokens a second, processor milliseconds a token, and tokens guessed, of so many generations at once."""
    before = engine.stats()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        engine.add(engine.prepare(GenerateRequest(request_id=f"{number}-{index}", token_ids=prompt, sampling=sampling)))
    began, used = time.perf_counter(), time.process_time()
    while engine.has_work():
        engine.step()
    after = engine.stats()
    tokens = after.generated_tokens_total - before.generated_tokens_total
    guessed = after.drafted_tokens_total - before.drafted_tokens_total
    return tokens / (time.perf_counter() - began), 1e3 * (time.process_time() - used) / tokens, guessed


def at_once(count: int, rounds: int, draft: int) -> None:
    """Prints what the switch is worth: with guesses allowed up to four sequences, and up to any number."""
    directory = resolve(DEFAULT_MODEL, default_cache_dir())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\nList ten facts about the number {n}.<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(text.format(n=index)).ids for index in range(count)]
    engines = {
        "no guesses": load_engine(EngineConfig(model=directory, num_blocks=1000, max_draft_tokens=0)),
        "guesses to 4": load_engine(EngineConfig(model=directory, num_blocks=1000, max_draft_tokens=draft)),
        "guesses always": load_engine(EngineConfig(model=directory, num_blocks=1000, max_draft_batch=64)),
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            seen = together(engine, prompts, number)
            if number:  # the first fills the caches
                found[name].append(seen)
    plain = found["no guesses"]
    for name, seen in found.items():
        rate = statistics.median(one[0] / other[0] for one, other in zip(seen, plain, strict=True))
        cost = statistics.median(one[1] / other[1] for one, other in zip(seen, plain, strict=True))
        print(
            f"{count} at once, {name:14}: {statistics.median(one[0] for one in seen):6.1f} tokens a second ({rate:.3f} x), "
            f"{statistics.median(one[1] for one in seen):6.2f} ms of processors a token ({cost:.3f} x), {seen[-1][2]} guessed"
        )
    for engine in engines.values():
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=52, help="0: all")
    parser.add_argument("--draft", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = turns(arguments.turns)
    with ExitStack() as stack:
        sides = {
            "plain": Side(stack, 0, arguments.dtype, plain=True),
            "guessing": Side(stack, arguments.draft, arguments.dtype, plain=False),
        }
        traces: dict[str, dict[str, Figures]] = defaultdict(lambda: {side: Figures() for side in SIDES})
        same = 0
        for number, (trace, request) in enumerate(chosen):
            answers = []
            for name in SIDES if number % 2 else reversed(SIDES):
                before = sides[name].stats()
                answer, seconds = sides[name].ask(request, arguments.temperature)
                traces[trace][name].add(before, sides[name].stats(), seconds)
                answers.append(answer)
            same += answers[0] == answers[1]
            print(f"{number + 1} of {len(chosen)}, {same} the same", end="\r", file=sys.stderr)
        whole = {side: Figures() for side in SIDES}
        print(f"{'trace':24} turns tokens  passes a token: plain  guessing   fewer   decoding: faster")
        for trace, figures in traces.items():
            show(trace, figures)
            for side in SIDES:
                for name in ("turns", "tokens", "passes", "seconds"):
                    setattr(whole[side], name, getattr(whole[side], name) + getattr(figures[side], name))
                for name, count in figures[side].counts.items():
                    whole[side].counts[name] += count
        show("all", whole)
        counts = whole["guessing"].counts
        print(f"{same} of {len(chosen)} answers the same; ", end="")
        print(", ".join(f"{name} {count:.0f}" for name, count in counts.items()))
    if arguments.batch:
        at_once(arguments.batch, arguments.rounds, arguments.draft)


def show(name: str, figures: dict[str, Figures]) -> None:
    plain, guessing = figures["plain"], figures["guessing"]
    print(
        f"{name:24} {guessing.turns:5} {guessing.tokens:6.0f} {plain.each:22.3f} {guessing.each:9.3f} "
        f"{plain.each / guessing.each:6.2f} x {plain.seconds / max(guessing.seconds, 1e-9):15.2f} x"
    )


if __name__ == "__main__":
    main()
