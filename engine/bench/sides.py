"""Who takes turns: this engine, stepped by hand, and other engines, each in a child process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from engine.engine import Engine
from engine.output import Addressed
from gateway.workers.protocol import Failed, GenerateRequest, SamplingParams, Tokens

Prompts = Sequence[Sequence[int]]

PACKAGES = {"transformers": "transformers", "openvino": "openvino-genai", "vllm": "vllm"}
_DRIVER = Path(__file__).parent / "peers" / "driver.py"
_LAST_WORDS = 2000


class PeerError(Exception):
    """A peer is not installed, or it failed. The message says which and what to do."""


class Side(Protocol):
    """Generates greedily from token ids, without a prefix cache and past any end token."""

    name: str

    def run(self, prompts: Prompts, tokens: Sequence[int]) -> float:
        """Seconds from submitting all prompts until each has generated its number of tokens."""

    def begin(self, prompts: Prompts, room: int) -> float:
        """Submits prompts for up to `room` tokens each. Seconds until all have their first one."""

    def decode(self, steps: int) -> float:
        """Seconds in which all that was begun generates `steps` tokens more."""

    def end(self) -> None:
        """Drops what was begun."""

    def cpu_seconds(self) -> float:
        """Processor time that its process has used."""

    def close(self) -> None:
        """Ends it. Idempotent."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of single steps: whole, and within the forward pass."""

    steps: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)

    def overheads(self) -> list[float]:
        """What each step took beside its forward pass."""
        return [step - forward for step, forward in zip(self.steps, self.forward, strict=True)]


class OwnSide:
    """The engine through its step interface, in this process. `times` collects the steps of `decode`."""

    name = "turnkeep"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times = StepTimes()
        self._begun: list[str] = []
        self._ids = 0

    def run(self, prompts: Prompts, tokens: Sequence[int]) -> float:
        began = time.perf_counter()
        for prompt, count in zip(prompts, tokens, strict=True):
            self._add(prompt, count)
        while self.engine.has_work():
            self._made(self.engine.step())
        return time.perf_counter() - began

    def begin(self, prompts: Prompts, room: int) -> float:
        began = time.perf_counter()
        self._begun = [self._add(prompt, room) for prompt in prompts]
        waiting = set(self._begun)
        while waiting:
            waiting -= self._made(self.engine.step()).keys()
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        made = dict.fromkeys(self._begun, 0)
        began = last = time.perf_counter()
        while min(made.values()) < steps:
            if not self.engine.has_work():
                raise RuntimeError(f"a sequence ended before its {steps} steps were made")
            forward = self.engine.forward_seconds
            for name, count in self._made(self.engine.step()).items():
                made[name] += count
            now = time.perf_counter()
            self.times.steps.append(now - last)
            self.times.forward.append(self.engine.forward_seconds - forward)
            last = now
        return last - began

    def end(self) -> None:
        for name in self._begun:
            self.engine.abort(name)
        self._begun = []

    def cpu_seconds(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.engine.close()

    def _add(self, prompt: Sequence[int], tokens: int) -> str:
        self._ids += 1
        name = f"bench-{self._ids}"
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=name, token_ids=list(prompt), sampling=sampling)
        self.engine.add(self.engine.prepare(request))
        return name

    def _made(self, chunks: Iterable[Addressed]) -> dict[str, int]:
        """Tokens that a step gave each request. Raises RuntimeError for a request that failed."""
        made: dict[str, int] = {}
        for name, chunk in chunks:
            if isinstance(chunk, Failed):
                raise RuntimeError(f"the engine failed: {chunk.message}")
            if isinstance(chunk, Tokens):
                made[name] = made.get(name, 0) + len(chunk.token_ids)
        return made


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """kind: transformers, openvino or vllm. model: a Hugging Face directory, for openvino one made by optimum-cli. python: of
    the environment that it is installed in. options: settings of the peer (driver.py)."""

    kind: str
    model: Path
    threads: int
    dtype: str
    vocab: int
    python: str = sys.executable
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model.name}" if self.kind == "openvino" else self.kind


class PeerSide:
    """A peer in a child process (peers/driver.py), which waits on a pipe while others take their turns. Raises PeerError."""

    def __init__(self, config: PeerConfig) -> None:
        """Starts the process and loads the model."""
        self.name = config.name
        self._config = config
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [config.python, str(_DRIVER), config.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            raise PeerError(f"{config.python}, the Python for {config.kind}, cannot be run: {error}.") from error
        try:
            loaded = self._ask(
                do="load",
                model=str(config.model),
                threads=config.threads,
                dtype=config.dtype,
                vocab=config.vocab,
                options=config.options,
            )
        except BaseException:
            self.close()
            raise
        self.version = str(loaded["version"])
        self.settings: dict[str, str] = loaded["settings"]

    def run(self, prompts: Prompts, tokens: Sequence[int]) -> float:
        return self._seconds(do="run", prompts=prompts, tokens=list(tokens))

    def begin(self, prompts: Prompts, room: int) -> float:
        return self._seconds(do="begin", prompts=prompts, room=room)

    def decode(self, steps: int) -> float:
        return self._seconds(do="decode", steps=steps)

    def end(self) -> None:
        self._ask(do="end")

    def cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _seconds(self, **command: Any) -> float:
        return float(self._ask(**command)["seconds"])

    def _ask(self, **command: Any) -> dict[str, Any]:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(json.dumps(command) + "\n")
            pipe_in.flush()
            line = pipe_out.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended without an answer{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if reply["ok"]:
            return reply
        kind = self._config.kind
        if reply["kind"] == "missing":
            raise PeerError(
                f"{kind} cannot be imported by {self._config.python} ({reply['message']}). Install it (pip install "
                f"{PACKAGES[kind]}), name the Python of an environment that has it (--peer-python {kind}=PATH), or leave out "
                f"--vs {kind}."
            )
        raise PeerError(f"{self.name} failed: {reply['message'].rstrip('.')}.")

    def _last_words(self) -> str:
        self._log.flush()
        self._log.seek(0)
        lines = self._log.read()[-_LAST_WORDS:].decode(errors="replace").strip().splitlines()
        return f"; the last it printed: {lines[-1]}" if lines else "."
