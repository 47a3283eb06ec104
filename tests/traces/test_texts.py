"""Sessions as growing texts, from each of the formats, made and real."""

import json
from pathlib import Path

import pytest

from tests.shared_data import shared_traces
from traces.format import TraceFormatError
from traces.importers.texts import read_texts

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"


def written(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_turn_adds_the_last_answer_and_what_is_new(tmp_path):
    def row(turn, text, answer, **more):
        message = {"role": "user", "content": text}
        return {"v": 1, "session": "s", "turn": turn, "messages": [message], "output_tokens": 1, **more} | {
            "assistant": {"role": "assistant", "content": answer}
        }

    file = written(
        tmp_path / "t.jsonl", row(0, "one", "1"), row(1, "two", "2"), row(2, "no", "x", keep=0), row(3, "three", "3")
    )
    (session,) = read_texts([file])
    assert [json.loads(f"[{text.replace('}{', '},{')}]") for text in session.additions] == [
        [{"role": "user", "content": "one"}],
        [{"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}],
        [{"role": "assistant", "content": "2"}, {"role": "user", "content": "three"}],
    ]


def test_rows_of_lmcache_are_put_in_order_and_those_that_do_not_go_on_are_left_out(tmp_path):
    def row(at, text):
        return {"timestamp": at, "input": text, "output": "", "session_id": "x"}

    file = written(
        tmp_path / "t.jsonl", row(3, "abc"), row(1, "a"), row(2, "ab"), row(4, "other"), row(5, "abcde"), row(6, "abcde")
    )
    (session,) = read_texts([file])
    assert session.additions == ("a", "b", "c", "de")


def test_paths_take_turns_and_sessions_of_one_turn_are_left_out(tmp_path):
    def result(*roles):
        return {"traj": [{"role": role, "content": role} for role in roles]}

    file = tmp_path / "tau.json"
    two = ("system", "user", "assistant", "tool", "assistant")
    file.write_text(json.dumps([result(*two), result("user", "assistant"), result(*two)]))
    names = [session.name for session in read_texts([file, BUNDLED])]
    assert names[:1] + names[2:3] == ["tau-0", "tau-2"]
    assert len(names) == 2 + 13


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a list of results"),
        ("a.json", '[{"traj": [{}]}]', "a list of results"),
        ("a.jsonl", '{"timestamp": 1, "input": "", "output": "", "session_id": ""}\n{}\n', "line"),
        ("a.jsonl", "nothing\n", "a.jsonl"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TraceFormatError, match=message):
        read_texts([tmp_path / name])


def test_real_ones():
    folder = shared_traces("tau_bench").parent
    sessions = read_texts([folder / "tau_bench" / "gpt-4o-airline.json", folder / "lmcache_agent_trace" / "miniswe"])
    assert len(sessions) == 107
    assert sum(len(session.additions) for session in sessions[:14]) > 100
    assert all(text for session in sessions[1:14:2] for text in session.additions)
