"""What `turnkeep bench offload` replays: which turns are counted, and how far sessions go."""

import numpy as np
import torch
from click.testing import CliRunner

from cli.bench_offload import offload_command
from engine.bench.offload.report import OffloadReport
from engine.bench.offload.virtual import replay_virtually, virtual_config
from engine.bench.offload.workload import fitting, sessions_of
from engine.models.registry import load_model


def history(name: str, *lengths: int):
    ids = np.random.default_rng(len(name)).integers(3, 300, max(lengths)).astype(np.uint32)
    return name, [ids[:length] for length in lengths]


def test_histories_end_where_the_context_does():
    histories = [history("short", 10, 20), history("grows", 10, 20, 30, 31), history("too long", 10, 31)]
    cut = {name: [len(prompt) for prompt in prompts] for name, prompts in fitting(histories, 30)}
    assert cut == {"short": [10, 20], "grows": [10, 20, 30]}


def test_sessions_begin_within_three_gaps_unless_told():
    histories = [history("one", 40, 50)]
    begins = [session.gaps[0] for session in sessions_of(histories, count=200, turns=2, output=2, gap=4.0, seed=1)]
    assert min(begins) >= 0
    assert 8 < max(begins) <= 12
    told = sessions_of(histories, count=200, turns=2, output=2, gap=4.0, seed=1, within=1.0)
    assert max(session.gaps[0] for session in told) <= 1


def test_first_tokens_of_all_turns_count_those_of_first_turns_too(tiny_checkpoint):
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = load_model(tiny_checkpoint("llama", max_position_embeddings=4096, **shape), dtype=torch.float32)
    sessions = sessions_of([history("one", 400, 420, 440)], count=2, turns=3, output=2, gap=8.0, seed=0)
    outcome, _ = replay_virtually(model, sessions, 8.0, virtual_config(max_draft_tokens=0), blocks=200, hints=True)
    assert len(outcome.first_tokens) == 6
    assert outcome.first_token(1.0) > 10 * outcome.first_token(0.5), "the first turn's prompt is computed whole"


def test_twice_the_sessions_come_faster_unless_the_gap_is_given(tiny_checkpoint, monkeypatch):
    asked = []

    def run(engines, bench, say):
        asked.append(bench)
        return OffloadReport(engines.block_bytes, 1)

    monkeypatch.setattr("engine.bench.offload.run.run_offload_bench", run)
    model = str(tiny_checkpoint("llama", max_position_embeddings=4096))
    for arguments in ([], ["--gap", "3"]):
        result = CliRunner().invoke(offload_command, ["--model", model, "--sessions", "3", *arguments])
        assert result.exit_code == 0, result.output
    known, told = asked
    assert (known.gap, known.twice_gap) == (8.0, 2.0)
    assert (told.gap, told.twice_gap) == (3.0, 3.0)
    assert len(known.sessions) == 3
    for one, other in zip(known.sessions, known.twice[:3], strict=True):
        assert one.name == other.name
        assert np.allclose(np.array(one.gaps), 4 * np.array(other.gaps))
