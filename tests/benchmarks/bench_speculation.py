"""Tool-call turns of the bundled trajectories, with guessed and forced tokens and without: passes a token, and the same text.

    python -m tests.benchmarks.bench_speculation [--turns 20] [--dtype float32] [--draft 8] [--temperature 0]

The embedded model answers each turn that was answered with a call, under the tools' grammar, from the recorded history. Both
sides run on the same machine, one after the other; printed are forward passes for each generated token (a pass that computes
several is one), how many of the guesses came true, and whether all texts are the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from traces.index import expand_paths, index_files

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_gateway import serve

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"


@dataclass
class Side:
    """What one engine did."""

    answers: list[Any]
    counts: dict[str, float]

    @property
    def tokens(self) -> float:
        return self.counts["generated_tokens"]

    @property
    def passes_a_token(self) -> float:
        """The first token of each answer comes from its prompt's pass."""
        return (self.counts["decode_passes"] + len(self.answers)) / self.tokens


def turns(limit: int) -> list[dict[str, Any]]:
    """Requests of the turns that were answered with calls."""
    found = []
    for entry in index_files(expand_paths([BUNDLED])):
        found += [
            {"messages": turn.messages, "tools": list(turn.tools), "tool_choice": "required"}
            for turn in entry.read()
            if turn.line.assistant.get("tool_calls")
        ]
    step = max(len(found) // limit, 1)
    return found[::step][:limit]


def play(requests: list[dict[str, Any]], draft: int, dtype: str, temperature: float) -> Side:
    """All of them on one replica, one at a time."""
    options = ("--engine", f"max-draft-tokens={draft}", "--dtype", dtype, "--replicas", 1, "--log-level", "warning")
    answers = []
    with serve(*options) as served, httpx2.Client(base_url=served.url, timeout=600) as client:
        before = None
        for number, request in enumerate([requests[0], *requests]):
            body = {**request, "temperature": temperature, "seed": 1, "max_tokens": 160}
            reply = client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            if number == 0:
                before = counts(served)  # the first one compiles the grammar
                continue
            message = reply.json()["choices"][0]["message"]
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
            answers.append((message["content"], calls))
            print(f"draft {draft}: {number} of {len(requests)}", end="\r", file=sys.stderr)
        after = counts(served)
    return Side(answers, {name: after[name] - (before or {}).get(name, 0.0) for name in after})


def counts(served: Any) -> dict[str, float]:
    """Of the replica: asked over the worker protocol, at the address that the gateway knows."""
    with httpx2.Client(base_url=served.url, timeout=30) as client:
        address = client.get("/workers").json()["data"][0]["url"]
    transport = httpx2.HTTPTransport(uds=address.removeprefix("unix:")) if address.startswith("unix:") else None
    with httpx2.Client(base_url="http://replica" if transport else address, transport=transport, timeout=30) as replica:
        text = replica.get("/metrics").text
    found = re.findall(r"^turnkeep_engine_(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--draft", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    requests = turns(arguments.turns)
    plain = play(requests, 0, arguments.dtype, arguments.temperature)
    guessing = play(requests, arguments.draft, arguments.dtype, arguments.temperature)
    same = sum(one == other for one, other in zip(plain.answers, guessing.answers, strict=True))
    result = {
        "turns": len(requests),
        "same_answers": same,
        "tokens": guessing.tokens,
        "passes_a_token_without": plain.passes_a_token,
        "passes_a_token": guessing.passes_a_token,
        "fewer_passes": plain.passes_a_token / guessing.passes_a_token,
        "drafted": guessing.counts["drafted_tokens"],
        "accepted": guessing.counts["accepted_tokens"],
        "forced": guessing.counts["forced_tokens"],
        "forced_without_drafts": plain.counts["forced_tokens"],
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{len(requests)} turns, {guessing.tokens:.0f} tokens, {same} answers the same.")
    print(f"Passes a token: {plain.passes_a_token:.3f} with forced tokens alone, {guessing.passes_a_token:.3f} with guesses")
    print(f"({1 / guessing.passes_a_token:.2f} x fewer than one for each). Drafted {result['drafted']:.0f}, ", end="")
    print(f"accepted {result['accepted']:.0f}, forced {result['forced']:.0f}.")


if __name__ == "__main__":
    main()
