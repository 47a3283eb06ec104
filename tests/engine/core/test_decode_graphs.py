"""Decode steps through graphs: which steps they take, what they copy, what they pad with.

The device's own capture is replaced by one that keeps the function; everything else is what runs on a GPU.
"""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from engine_harness import Driver, make_engine, random_prompt

from engine.batch import single_batch
from engine.config import ConfigError, EngineConfig
from engine.decode_graphs import DecodeGraphs
from engine.forward import LayeredForward
from engine.kernels.interface import StepBatch
from engine.kernels.reference import ReferenceAttention
from engine.models.registry import load_model
from engine.runner import Runner, allocate_kv

ROOT = Path(__file__).parents[3]


class ReplayedFunction:
    """Stands in for a captured graph: keeps the function and calls it again, into the same output. Like a graph it sees only
    what lies in the tensors, so it must not be told anything else by then."""

    def __init__(self, work):
        self.work = work
        self.output = work()
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.output.copy_(self.work())


class Capturing:
    def __init__(self):
        self.graphs = []

    def capture(self, work):
        self.graphs.append(ReplayedFunction(work))
        return self.graphs[-1]


class ByTensors:
    """A forward pass that, as kernels do, takes its batch from the tensors and its lists as bounds; keeps what it was given."""

    def __init__(self, decoder):
        self._layers = LayeredForward(decoder, ReferenceAttention())
        self.batches = []

    def run(self, batch, kv, rows):
        assert all(a <= b for a, b in zip(batch.context_lens.tolist(), batch.context_lens_list, strict=True))
        assert batch.query_start.tolist() == list(batch.query_start_list)
        tensors = {name: getattr(batch, name).clone() for name in TENSORS}
        told = StepBatch(
            **tensors, query_start_list=batch.query_start_list, context_lens_list=tuple(batch.context_lens.tolist())
        )
        self.batches.append(told)
        return self._layers.run(told, kv, rows)


TENSORS = [field.name for field in fields(StepBatch) if not field.name.endswith("_list")]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("qwen2", num_hidden_layers=2), dtype=torch.float32)


def graphed(model, sizes, *, blocks=8, block_size=4, max_model_len=20):
    kv = allocate_kv(model, blocks + 1, block_size)
    kv.fill_(torch.nan)
    forward, capture = ByTensors(model.decoder), Capturing()
    graphs = DecodeGraphs(forward, kv, capture, sizes, max_model_len)
    return Runner(forward, kv, graphs), kv, forward, capture


def decode_batch(model, spans, block_size=4):
    """spans: a block table and a context for each sequence."""
    width = max(len(table) for table, _ in spans)
    positions = torch.tensor([context - 1 for _, context in spans])
    slots = [table[(context - 1) // block_size] * block_size + (context - 1) % block_size for table, context in spans]
    count = len(spans)
    return StepBatch(
        token_ids=torch.arange(3, 3 + count),
        positions=positions,
        slots=torch.tensor(slots),
        query_start=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table, _ in spans], dtype=torch.int32),
        query_start_list=tuple(range(count + 1)),
        context_lens_list=tuple(context for _, context in spans),
    )


def test_capturing_takes_the_largest_first_and_touches_the_paddings_block_only(model):
    runner, kv, forward, capture = graphed(model, (1, 2, 4))
    runner.capture_graphs()
    assert [batch.num_sequences for batch in forward.batches] == [4, 2, 1]
    assert [tuple(graph.output.shape) for graph in capture.graphs] == [(4, 320), (2, 320), (1, 320)]
    assert kv[:-1].isnan().all()
    assert not kv[-1, :, :, :, 0].isnan().any()
    for batch in forward.batches:
        assert batch.slots.tolist() == [8 * 4] * batch.num_sequences
        assert batch.block_tables[:, 0].tolist() == [8] * batch.num_sequences
        assert batch.context_lens.tolist() == [1] * batch.num_sequences


def test_a_step_is_padded_to_the_next_size_and_equals_the_eager_one(model):
    runner, kv, forward, capture = graphed(model, (1, 2, 4))
    eager_kv = kv.clone()
    eager = Runner(LayeredForward(model.decoder, ReferenceAttention()), eager_kv)
    runner.capture_graphs()
    for one in (runner, eager):
        one.run(single_batch([1, 2], 0, 6, 4), [5])
        one.run(single_batch([5], 0, 3, 4), [2])
        one.run(single_batch([0, 3], 0, 8, 4), [7])
    four, two, one_graph = capture.graphs
    captured = len(forward.batches)
    # After the four, smaller steps must not see what the buffers held.
    for spans, graph in [
        ([([1, 2], 7), ([5], 4), ([0, 3, 7], 9), ([4], 1)], four),
        ([([1, 2], 8), ([5, 6], 5), ([0, 3, 7], 10)], four),  # the fourth must not write to block 4 again
        ([([0, 3, 7], 11)], one_graph),
        ([([5, 6], 6), ([1, 2, 4], 9)], two),
        ([([0, 3, 7], 12), ([1, 2, 4], 10), ([5, 6], 7)], four),
    ]:
        batch = decode_batch(model, spans)
        before = graph.replays
        logits = runner.run(batch, range(len(spans)))
        assert graph.replays == before + 1
        assert torch.equal(logits, eager.run(batch, range(len(spans))))
        told, count = forward.batches[-1], len(spans)
        for name in ("token_ids", "positions", "slots", "context_lens"):
            assert torch.equal(getattr(told, name)[:count], getattr(batch, name))
        assert torch.equal(told.block_tables[:count, : batch.block_tables.shape[1]], batch.block_tables)
        assert told.slots[count:].tolist() == [8 * 4] * (told.num_sequences - count)
        assert told.block_tables[count:, 0].tolist() == [8] * (told.num_sequences - count)
        assert told.context_lens[count:].tolist() == [1] * (told.num_sequences - count)
    assert len(forward.batches) == captured + 5
    torch.testing.assert_close(kv[:-1], eager_kv[:-1], rtol=0, atol=0, equal_nan=True)


def test_what_is_no_captured_decode_step_runs_eagerly(model):
    runner, _, forward, capture = graphed(model, (1, 2), max_model_len=9)
    graphs = runner._graphs
    decode = decode_batch(model, [([1, 2], 7), ([5], 4)])
    assert graphs.size_for(decode, [0, 1]) is None, "before the capture there is no graph"
    runner.capture_graphs()
    assert graphs.size_for(decode, [0, 1]) == 2
    assert graphs.size_for(decode, [1]) is None, "one row's logits are not wanted"
    assert graphs.size_for(decode, [1, 0]) is None
    assert graphs.size_for(decode_batch(model, [([1, 2, 3], 10)]), [0]) is None, "a longer context than was captured"
    assert graphs.size_for(decode_batch(model, [([1], 2), ([2], 2), ([3], 2)]), [0, 1, 2]) is None, "three sequences"
    assert graphs.size_for(single_batch([1], 0, 2, 4), [0, 1]) is None, "a prefill of two tokens"
    ran = len(forward.batches)
    runner.run(single_batch([1], 0, 2, 4), [1])
    assert len(forward.batches) == ran + 1
    assert [graph.replays for graph in capture.graphs] == [0, 0]


def test_an_engine_gives_the_same_tokens_with_graphs(model):
    """Prefill beside decode, batches that grow and shrink, a pool so small that sequences are preempted."""
    prompts = [random_prompt(seed, length) for seed, length in ((1, 5), (2, 11), (3, 3), (4, 17), (5, 8))]
    outcomes = []
    for sizes in ((), (1, 2, 4)):
        capture = Capturing()
        engine = make_engine(
            model,
            num_blocks=14,
            max_model_len=56,
            forward=ByTensors(model.decoder),
            graph_capture=capture,
            graph_batch_sizes=sizes,
            max_num_batched_tokens=16,
        )
        assert engine._runner._kv.shape[0] == 14 + bool(sizes)
        assert engine.info.num_blocks == engine.stats().num_blocks == 14
        engine.warm_up()
        assert len(capture.graphs) == len(sizes)
        driver = Driver(engine)
        for index, prompt in enumerate(prompts):
            driver.add(f"r{index}", prompt, max_tokens=9 + index)
        seen = driver.run()
        assert engine.stats().preemptions_total > 0
        assert all(graph.replays for graph in capture.graphs)
        outcomes.append([seen[f"r{index}"].tokens for index in range(len(prompts))])
    assert outcomes[0] == outcomes[1]


def test_sizes_beyond_the_number_of_sequences_are_left_out(model):
    capture = Capturing()
    engine = make_engine(model, graph_capture=capture, forward=ByTensors(model.decoder), max_num_seqs=3)
    engine.warm_up()
    assert [len(graph.output) for graph in capture.graphs] == [2, 1]


@pytest.mark.parametrize("sizes", [(0, 1), (1, 1), (4, 2)])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"graph_batch_sizes is \d, \d; it must be ascending"):
        EngineConfig(model=Path("tiny"), graph_batch_sizes=sizes)


STEP = """
import sys, torch
from pathlib import Path
from engine.config import EngineConfig
from engine.loading import load_engine
from gateway.workers.protocol import GenerateRequest, SamplingParams
config = EngineConfig(model=Path(sys.argv[1]), num_blocks=16, threads=1, kernels=sys.argv[3])
engine = load_engine(config, cache_dir=Path(sys.argv[2]))
sampling = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=3, logprobs=2)
engine.add(engine.prepare(GenerateRequest(request_id="r", token_ids=[5, 6, 7], sampling=sampling)))
while engine.has_work():
    engine.step()
assert engine.stats().generated_tokens_total == 3
engine.close()
print(sorted(name for name in sys.modules if name.partition(".")[0] == "triton" or name.startswith("engine.kernels.triton")))
"""


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_on_a_cpu_nothing_imports_triton(tiny_checkpoint, model_cache_dir, kernels):
    directory = tiny_checkpoint("llama", hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(directory), str(model_cache_dir), kernels],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
