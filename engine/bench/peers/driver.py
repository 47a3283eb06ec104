"""Drives another engine, in a process of its own: one JSON object a line in, one out.

Run by its path, possibly by the Python of another environment in which this project is not installed: it needs the standard
library and the engine that it drives, nothing else. Commands ("do"), and what is answered beside {"ok": true}:

    load    name, model, threads, dtype, vocab, options    version, settings
    run     prompts, tokens (one number a prompt)          seconds, from the submission of all to the end of the last
    begin   prompts, room                                  seconds, until each has its first token
    decode  steps                                          seconds, in which each got `steps` tokens more
    end                                                    drops what was begun
    quit

An error is {"ok": false, "kind": "missing" (not installed) or "failed", "message"}.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
TRIED_PRECISIONS = ("bf16", "f32", "f16")
RESERVE = 64


class Transformers:
    """`transformers` in eager mode: batches of equal lengths, one group of them after the other; greedy, with its DynamicCache
    and without the overhead of `generate`."""

    def load(self, model: str, threads: int, dtype: str, vocab: int, options: dict[str, str]) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **options).eval()
        # Renamed in the course of version 5.
        self.cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        return {"version": transformers.__version__, "settings": {"dtype": dtype, **options}}

    def run(self, prompts: Prompts, tokens: list[int]) -> float:
        groups: dict[tuple[int, int], Prompts] = {}
        for prompt, count in zip(prompts, tokens, strict=True):
            groups.setdefault((len(prompt), count), []).append(prompt)
        began = time.perf_counter()
        for (_, count), group in groups.items():
            self.begin(group, count)
            self.decode(count - 1)
            self.end()
        return time.perf_counter() - began

    def begin(self, prompts: Prompts, room: int) -> float:
        from transformers import DynamicCache

        began = time.perf_counter()
        self.cache = DynamicCache()
        self._forward(self.torch.tensor(prompts))
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._forward(self.last)
        return time.perf_counter() - began

    def end(self) -> None:
        self.cache = self.last = None

    def _forward(self, ids: Any) -> None:
        with self.torch.inference_mode():
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_name: self.cache})
            self.last = output.logits[:, -1].argmax(-1, keepdim=True)


class OpenVINO:
    """openvino.genai's ContinuousBatchingPipeline, stepped by hand, without prefix caching. The model is an export or GGUF.

    Options: max_num_batched_tokens, cache_size (GB), and any property of the CPU plugin. Without INFERENCE_PRECISION_HINT, the
    fastest of TRIED_PRECISIONS on a prefill of 512 tokens and 16 tokens of decode is taken: the plugin's own choice is not
    always its best.
    """

    def load(self, model: str, threads: int, dtype: str, vocab: int, options: dict[str, str]) -> dict[str, Any]:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.handles: list[Any] = []
        self.ids = 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = int(options.pop("max_num_batched_tokens", "512"))
        scheduler.cache_size = int(options.pop("cache_size", "4"))
        scheduler.max_num_seqs = 64
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **options}
        name = "INFERENCE_PRECISION_HINT"
        if name not in properties:
            properties[name] = min(
                TRIED_PRECISIONS, key=lambda hint: self._try(model, scheduler, {**properties, name: hint}, vocab)
            )
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        settings = {**properties, "max_num_batched_tokens": scheduler.max_num_batched_tokens}
        exported = Path(model) / "openvino_model.xml"  # a GGUF file has none
        if exported.exists():
            settings["compiled for"] = str(openvino.Core().compile_model(str(exported), "CPU", properties).get_property(name))
        return {"version": openvino_genai.__version__, "settings": {key: str(value) for key, value in settings.items()}}

    def _try(self, model: str, scheduler: Any, properties: dict[str, Any], vocab: int) -> float:
        try:
            self.pipeline = self.genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        except RuntimeError:
            return float("inf")  # no such precision here
        prompt = [random.randrange(vocab) for _ in range(512)]
        self.run([prompt[:64]], [4])
        prefill = self.run([prompt], [1])
        self.begin([prompt[:16]], 64)
        decode = self.decode(16)
        self.end()
        return prefill + decode

    def run(self, prompts: Prompts, tokens: list[int]) -> float:
        began = time.perf_counter()
        handles = [self._add(prompt, count) for prompt, count in zip(prompts, tokens, strict=True)]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        seconds = time.perf_counter() - began
        made = [sum(len(output.generated_ids) for output in handle.read_all()) for handle in handles]
        if made != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {made}")
        return seconds

    def begin(self, prompts: Prompts, room: int) -> float:
        began = time.perf_counter()
        self.handles = [self._add(prompt, room) for prompt in prompts]
        self.made = [0] * len(prompts)
        while min(self.made) < 1:
            self._step()
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        before = list(self.made)
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = time.perf_counter() - began
        made = [now - then for now, then in zip(self.made, before, strict=True)]
        if made != [steps] * len(made):
            raise RuntimeError(f"{steps} steps made {made} tokens")
        return seconds

    def end(self) -> None:
        for handle in self.handles:
            handle.cancel()
        self.handles = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()

    def _add(self, prompt: list[int], tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        self.ids += 1
        ids = self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
        return self.pipeline.add_request(self.ids, ids, config)

    def _step(self) -> None:
        self.pipeline.step()
        for index, handle in enumerate(self.handles):
            while handle.can_read():
                self.made[index] += sum(len(output.generated_ids) for output in handle.read().values())


class VLLM:
    """vLLM's LLMEngine in this process, without prefix caching. Options: any of EngineArgs, as JSON values."""

    def load(self, model: str, threads: int, dtype: str, vocab: int, options: dict[str, str]) -> dict[str, Any]:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        import vllm
        from vllm import EngineArgs, LLMEngine

        self.vllm = vllm
        self.ids = 0
        self.made: dict[str, int] = {}
        settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False, "max_num_seqs": 64}
        settings |= {key: _json(value) for key, value in options.items()}
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **settings))
        return {"version": vllm.__version__, "settings": {key: str(value) for key, value in settings.items()}}

    def run(self, prompts: Prompts, tokens: list[int]) -> float:
        began = time.perf_counter()
        for prompt, count in zip(prompts, tokens, strict=True):
            self._add(prompt, count)
        while self.engine.has_unfinished_requests():
            self._step()
        seconds = time.perf_counter() - began
        if list(self.made.values()) != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {list(self.made.values())}")
        self.made = {}
        return seconds

    def begin(self, prompts: Prompts, room: int) -> float:
        began = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, room)
        while min(self.made.values()) < 1:
            self._step()
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        before = dict(self.made)
        began = time.perf_counter()
        while any(self.made[name] - count < steps for name, count in before.items()):
            self._step()
        return time.perf_counter() - began

    def end(self) -> None:
        self.engine.abort_request(list(self.made))
        self.made = {}

    def _add(self, prompt: list[int], tokens: int) -> None:
        self.ids += 1
        name = str(self.ids)
        sampling = self.vllm.SamplingParams(
            max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.made[name] = 0

    def _step(self) -> None:
        for output in self.engine.step():
            self.made[output.request_id] = len(output.outputs[0].token_ids)


DRIVERS: dict[str, Any] = {"transformers": Transformers, "openvino": OpenVINO, "vllm": VLLM}


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def answer(driver: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Carries out one command."""
    what = command.pop("do")
    if what == "load":
        loaded: dict[str, Any] = driver.load(**command)
        return loaded
    result = {"run": driver.run, "begin": driver.begin, "decode": driver.decode, "end": driver.end}[what](**command)
    return {} if result is None else {"seconds": result}


def main() -> None:
    """Answers commands on standard input until it ends. Whatever the engine prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = DRIVERS[sys.argv[1]]()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            reply = {"ok": True, **answer(driver, command)}
        except ImportError as error:
            reply = {"ok": False, "kind": "missing", "message": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
            reply = {"ok": False, "kind": "failed", "message": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
