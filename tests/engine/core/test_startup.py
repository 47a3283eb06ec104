"""The parts of a start, what is remembered from one start to the next, and the warm-up pass."""

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine

from engine import loading
from engine.config import EngineConfig
from engine.measurements import Measurements
from engine.models.registry import load_model
from engine.startup import StartupClock, describe, seconds_since_launch


def test_every_moment_counts_for_one_part():
    now = [100.0]
    clock = StartupClock(0.5, lambda: now[0])
    for part, seconds in (("compile", 2.0), ("warm_up", 3.0), ("load", 5.0), ("warm_up", 7.0)):
        now[0] += seconds  # for the part before
        clock.enter(part)
    now[0] += 11.0
    parts = clock.seconds()
    assert (parts.load, parts.compile, parts.warm_up) == (0.5 + 2.0 + 7.0, 3.0, 5.0 + 11.0)
    assert describe(parts) == "started in 28.50 s: load 9.50 s, compile 3.00 s, warm-up 16.00 s"
    now[0] += 1.0
    assert clock.seconds().warm_up == 17.0


AGE = "import time; time.sleep(0.4); from engine.startup import seconds_since_launch; print(seconds_since_launch())"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process began")
def test_the_age_of_a_process_includes_what_came_before_python_code():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", AGE], capture_output=True, text=True, timeout=60, check=True)
    assert 0.4 <= float(done.stdout) + 0.02 <= time.monotonic() - began + 0.04


def test_the_age_of_a_process_whose_name_looks_like_fields(tmp_path):
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 3.0) * os.sysconf("SC_CLK_TCK"))
    fields = ["S", *map(str, range(4, 22)), str(ticks), "1", "2"]
    (tmp_path / "stat").write_text(f"17 (a) b 1 2 (c) {' '.join(fields)}\n")
    assert 2.9 <= seconds_since_launch(tmp_path) <= 4.0
    (tmp_path / "stat").write_text("17 (short) S 1\n")
    assert seconds_since_launch(tmp_path) == 0.0
    assert seconds_since_launch(tmp_path / "nowhere") == 0.0


def test_a_measurement_is_found_under_the_same_circumstances_only(tmp_path):
    kept = Measurements(tmp_path / "kept")
    circumstances = {"dtype": torch.bfloat16, "tokens": 512, "window": None}
    assert kept.get("step", circumstances) is None
    kept.put("step", circumstances, 12345)
    assert Measurements(tmp_path / "kept").get("step", dict(reversed(circumstances.items()))) == 12345
    assert kept.get("other", circumstances) is None
    for change in ({"dtype": torch.float32}, {"tokens": 511}, {"window": 1}, {"more": 0}):
        assert kept.get("step", circumstances | change) is None
    kept.put("step", circumstances, 7)
    assert kept.get("step", circumstances) == 7


@pytest.mark.parametrize("content", [b"", b"{", b'"5"', b"true", b"1.5", b"\xff\xfe"])
def test_a_damaged_measurement_is_none(tmp_path, content):
    kept = Measurements(tmp_path)
    kept.put("step", {}, 5)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert kept.get("step", {}) is None


def test_measurements_that_cannot_be_written_are_made_again(tmp_path):
    (tmp_path / "file").write_text("in the way")
    kept = Measurements(tmp_path / "file" / "kept")
    kept.put("step", {}, 5)
    assert kept.get("step", {}) is None


def test_old_measurements_go(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.measurements._MAX_FILES", 3)
    kept = Measurements(tmp_path)
    for index in range(5):
        kept.put("step", {"index": index}, index)
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), ns=(index, index))
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("llama", seed=5), dtype=torch.float32)


def books(engine):
    stats = engine.stats()
    return stats, engine.snapshot(), engine.take_events(), engine.has_work()


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_model_len"), [(64, 4, 256), (1, 1, 2), (3, 7, 22), (40, 16, 10), (1, 256, 256)]
)
def test_warming_up_leaves_no_trace(model, num_blocks, block_size, max_model_len):
    def new():
        return make_engine(model, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)

    cold, warm = new(), new()
    warm.started_in(cold_seconds := StartupClock().seconds())
    warm.warm_up()
    warm.check_integrity()
    assert warm.info.startup == cold_seconds
    before, after = books(cold), books(warm)
    assert before[1:] == after[1:] == (before[1], [], False)
    for field in before[0].__struct_fields__:
        if field != "instance":
            assert getattr(before[0], field) == getattr(after[0], field), field
    prompt = np.random.default_rng(num_blocks).integers(3, 320, max(1, max_model_len // 2)).tolist()
    told = []
    for engine in (cold, warm):
        driver = Driver(engine)
        driver.add("greedy", prompt[:1], max_tokens=1)
        driver.run()
        driver.add("sampled", prompt, max_tokens=min(8, max_model_len), temperature=1.0, seed=3, logprobs=2)
        told.append([(seen.tokens[0], seen.logprobs[0], seen.started.cached_tokens) for seen in driver.run().values()])
    assert told[0] == told[1]
    with pytest.raises(RuntimeError, match="before the first request"):
        warm.warm_up()


def test_warming_up_computes_a_prompt_and_a_token(model):
    ran = []

    class Recorder:
        def run(self, batch, kv, rows):
            ran.append((batch.num_tokens, batch.context_lens_list, kv.shape[0]))
            return torch.full((len(rows), model.spec.vocab_size), float("nan"))  # even broken logits only make errors

    make_engine(model, num_blocks=64, block_size=4, forward=Recorder()).warm_up()
    assert ran == [(64, (64,), 64), (1, (64,), 64)]


def test_the_second_start_remembers_what_the_first_measured(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    measured = []
    real = loading.kv_budget.__globals__["_largest_step_bytes"]
    monkeypatch.setattr("engine.kv_memory._largest_step_bytes", lambda *args: measured.append(real(*args)) or measured[-1])
    monkeypatch.setattr("engine.kv_memory.available_memory", lambda: 1 << 28)

    def start(**settings):
        config = EngineConfig(model=tiny_checkpoint("qwen2"), dtype="float32", kernels="reference", **settings)
        clock = StartupClock(2.0)
        engine = loading.load_engine(config, cache_dir=tmp_path, clock=clock)
        engine.close()
        return engine.info

    first, second = start(), start(model_name="another", kv_memory_fraction=0.4)
    assert len(measured) == 1
    assert first.num_blocks == second.num_blocks
    start(max_num_batched_tokens=128)
    assert len(measured) == 2
    assert second.startup.load >= 2.0
    assert second.startup.compile >= 0.0
    assert second.startup.warm_up > 0.0
    assert re.search(r"another started in \d+\.\d\d s: load \d+\.\d\d s, compile 0\.\d\d s, warm-up 0\.\d\d s", caplog.text)
