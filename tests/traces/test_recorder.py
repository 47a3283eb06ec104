"""The recorder: what passed through the gateway can be replayed; nothing blocks, nothing grows, no line is torn."""

from __future__ import annotations

import logging
import threading

import pytest

from gateway.turn import SessionRef, TurnRecord
from traces.format import decode_line
from traces.index import expand_paths, index_files
from traces.recorder import Recorder, RecorderConfig, RecorderError, RecorderStats
from traces.session_file import SessionFile, file_name

SYSTEM = {"role": "system", "content": "s"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def record(messages, answer="ok", *, key="a", tenant="", started_at=100.0, **changes):
    request = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0, "stream": True, "user": "bob"}
    fields = {
        "request_id": "r1",
        "dialect": "chat",
        "model": "m",
        "session": SessionRef(tenant, key),
        "started_at": started_at,
        "duration": 2.0,
        "time_to_first_token": 0.5,
        "request": request,
        "response": {"choices": [{"message": {"role": "assistant", "content": answer, "tool_calls": None, "annotations": []}}]},
        "status": 200,
        "finish_reason": "stop",
        "prompt_tokens": 40,
        "completion_tokens": 7,
        "cached_tokens": 16,
        "worker": "replica-0",
    }
    return TurnRecord(**{**fields, **changes})


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def recorders():
    started = []

    def start(directory, **bounds):
        recorder = Recorder(RecorderConfig(directory, **bounds))
        started.append(recorder)
        return recorder

    yield start
    for recorder in started:
        recorder.close()


def read(directory):
    return {entry.session: list(entry.read()) for entry in index_files(expand_paths([directory]))}


def test_a_session_is_recorded_and_read_back(tmp_path, recorders):
    recorder = recorders(tmp_path)
    first = [SYSTEM, user("1")]
    second = [*first, assistant("ok"), user("2")]
    recorder.turn_finished(record(first))
    recorder.turn_finished(record(second, "fine", started_at=105.5))
    recorder.turn_finished(record([SYSTEM, user("new")], "again", started_at=110.0))
    assert recorder.flush()
    (turns,) = read(tmp_path).values()
    assert [turn.messages for turn in turns] == [first, second, [SYSTEM, user("new")]]
    assert [turn.line.gap_seconds for turn in turns] == [0.0, 3.5, 2.5]
    assert [turn.line.keep for turn in turns] == [None, None, 1]
    assert [len(turn.line.messages) for turn in turns] == [2, 1, 1]
    assert [list(turn.tools) for turn in turns] == [TOOLS] * 3
    line = turns[1].line
    assert line.assistant == assistant("fine")
    assert line.params == {"temperature": 0}
    assert (line.output_tokens, line.finish_reason, line.usage.cached_tokens, line.timing.time_to_first_token) == (
        7,
        "stop",
        16,
        0.5,
    )
    assert recorder.stats == RecorderStats(written=3, bytes_written=sum(p.stat().st_size for p in tmp_path.glob("*.jsonl")))


def test_a_second_recorder_continues_the_file(tmp_path, recorders):
    first = recorders(tmp_path)
    first.turn_finished(record([user("1")]))
    with pytest.raises(RecorderError, match="Another recorder writes in"):
        Recorder(RecorderConfig(tmp_path))
    first.close()
    (file,) = tmp_path.glob("*.jsonl")
    with open(file, "ab") as handle:
        handle.write(b'{"v":1,"session":"a","turn":1,"mess')
    second = recorders(tmp_path)
    history = [user("1"), assistant("ok"), user("2")]
    second.turn_finished(record(history, started_at=103.0))
    second.turn_finished(record([*history, assistant("ok"), user("3")], started_at=106.0))
    assert second.flush()
    turns = read(tmp_path)["a"]
    assert [turn.messages for turn in turns] == [[user("1")], history, [*history, assistant("ok"), user("3")]]
    assert [(turn.line.keep, turn.line.gap_seconds) for turn in turns] == [(None, 0.0), (0, 1.0), (None, 1.0)]


def test_a_file_of_somebody_else_is_left_alone(tmp_path, recorders, caplog):
    path = tmp_path / file_name("", "a")
    for content in ("my diary", "my diary\n", '{"v":1}\n'):
        path.write_text(content)
        recorder = recorders(tmp_path)
        recorder.turn_finished(record([user("1")]))
        recorder.close()
        assert path.read_text() == content
        assert recorder.stats == RecorderStats(failed=1)
    assert "was not recorded" in caplog.text


@pytest.mark.parametrize("size", [10, 70_000, 300_000])
def test_the_last_line_is_found_however_long(tmp_path, size):
    path = tmp_path / "s.jsonl"
    head = b'{"v":1,"session":"s","turn":%d,"messages":[{"role":"user","content":"'
    tail = b'"}],"assistant":{"role":"assistant"},"output_tokens":1}\n'
    whole = b"".join(head % turn + b"x" * size + tail for turn in range(3))
    for lines in range(4):
        cut = sum(len(line) for line in whole.splitlines(keepends=True)[:lines])
        path.write_bytes(whole[: cut + 90])
        assert SessionFile.open(path, "s").next_turn == lines
        assert path.stat().st_size == cut


def test_callers_without_a_name_are_told_apart_by_their_history(tmp_path, recorders):
    recorder = recorders(tmp_path)
    for turn in (1, 2, 3):
        for who in ("x", "y"):
            history = [SYSTEM, user(who)]
            for past in range(1, turn):
                history += [assistant(f"{who}{past}"), user(f"{who} goes on")]
            recorder.turn_finished(record(history, f"{who}{turn}", key=None, request_id=f"{who}-{turn}"))
    # The very same first request again, and one of another tenant, are new sessions.
    recorder.turn_finished(record([SYSTEM, user("x")], "x1", key=None, request_id="again"))
    recorder.turn_finished(
        record([SYSTEM, user("x"), assistant("x1"), user("q")], key=None, tenant="t" * 32, request_id="other")
    )
    assert recorder.flush()
    sessions = read(tmp_path)
    assert {name: len(turns) for name, turns in sessions.items()} == {
        "unnamed-x-1": 3,
        "unnamed-y-1": 3,
        "unnamed-again": 1,
        "tttttttt:unnamed-other": 1,
    }


def test_sessions_of_two_tenants_and_odd_names_do_not_mix(tmp_path, recorders):
    recorder = recorders(tmp_path)
    keys = [("", "../../etc/passwd"), ("1" * 32, "k"), ("2" * 32, "k"), ("", "k"), ("", "é" * 300), ("", "...")]
    for tenant, key in keys:
        recorder.turn_finished(record([user(key)], tenant=tenant, key=key))
    assert recorder.flush()
    assert len(list(tmp_path.glob("*.jsonl"))) == len(keys)
    assert all(path.parent == tmp_path and len(path.name) < 80 for path in tmp_path.rglob("*.jsonl"))
    assert set(read(tmp_path)) == {"../../etc/passwd", "11111111:k", "22222222:k", "k", "é" * 300, "..."}


def test_what_is_no_answered_chat_turn_is_skipped(tmp_path, recorders):
    recorder = recorders(tmp_path)
    recorder.turn_finished(record([user("1")], status=503, error="no worker"))
    recorder.turn_finished(record([user("1")], response=None))
    recorder.turn_finished(record([user("1")], request={"prompt": "p"}))
    recorder.turn_finished(record([user("1")], response={"choices": [{"text": "t"}]}))
    recorder.turn_finished(record([user("\ud800")], key="b"))
    assert recorder.flush()
    assert recorder.stats == RecorderStats(skipped=4, failed=1)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_full_disk_tears_no_line(tmp_path, recorders, monkeypatch):
    recorder = recorders(tmp_path)
    append, broken = SessionFile.append, threading.Event()

    def fail(self, encoded, ended_at):
        if broken.is_set():
            raise OSError(28, "No space left on device")
        return append(self, encoded, ended_at)

    monkeypatch.setattr(SessionFile, "append", fail)
    recorder.turn_finished(record([user("1")]))
    assert recorder.flush()
    broken.set()
    recorder.turn_finished(record([user("1"), assistant("ok"), user("2")]))
    assert recorder.flush()
    broken.clear()
    third = [user("1"), assistant("ok"), user("2"), assistant("ok"), user("3")]
    recorder.turn_finished(record(third))
    assert recorder.flush()
    turns = read(tmp_path)["a"]
    assert [turn.messages for turn in turns] == [[user("1")], third]
    assert (recorder.stats.written, recorder.stats.failed) == (2, 1)


def test_a_write_that_stops_halfway_is_undone(tmp_path):
    path = tmp_path / "s.jsonl"
    file = SessionFile(path, "s")
    assert file.append(b"whole\n", 1.0) == 6
    with pytest.raises(TypeError):
        file.append(_HalfBytes(), 2.0)
    assert path.read_bytes() == b"whole\n"
    assert (file.next_turn, file.ended_at) == (1, 1.0)


class _HalfBytes(bytes):
    """Ten bytes long, of which the second half cannot be had."""

    def __len__(self):
        return 10

    def __getitem__(self, where):
        return b"half" if where.start == 0 else None


def test_a_slow_disk_drops_and_never_blocks(tmp_path, recorders, monkeypatch, caplog):
    gate, entered, append = threading.Event(), threading.Event(), SessionFile.append

    def wait(self, encoded, ended_at):
        entered.set()
        gate.wait(20)
        return append(self, encoded, ended_at)

    monkeypatch.setattr(SessionFile, "append", wait)
    recorder = recorders(tmp_path, max_queued_turns=3, max_queued_prompt_tokens=90)
    with caplog.at_level(logging.WARNING):
        recorder.turn_finished(record([user("1")]))
        assert entered.wait(20)
        for _ in range(5):
            recorder.turn_finished(record([user("1")]))  # 40 prompt tokens each: two fit
    assert recorder.stats.dropped == 3
    assert caplog.text.count("behind its disk") == 1
    assert not recorder.flush(timeout=0.01)
    gate.set()
    recorder.close()
    assert recorder.stats.written == 3
    recorder.turn_finished(record([user("late")]))
    assert recorder.stats.dropped == 4


def test_memory_of_sessions_is_bounded(tmp_path, recorders):
    recorder = recorders(tmp_path, max_sessions=4, max_remembered_messages=6)
    for turn in range(3):
        for number in range(20):
            history = [user("1"), *[assistant("ok"), user("2")] * turn]
            recorder.turn_finished(record(history, key=f"k{number}" if number % 2 else None, request_id=f"{number}-{turn}"))
    assert recorder.flush()
    assert len(recorder._sessions) <= 4
    assert len(recorder._anonymous) <= 4
    assert recorder._remembered == sum(session.encoder.digests for session in recorder._sessions.values())
    assert recorder._remembered <= 6
    named = {name: turns for name, turns in read(tmp_path).items() if name.startswith("k")}
    assert len(named) == 10
    assert all([len(turn.messages) for turn in turns] == [1, 3, 5] for turns in named.values())


def test_the_directory_is_bounded(tmp_path, recorders):
    recorder = recorders(tmp_path, max_bytes=1000)
    for number in range(30):
        recorder.turn_finished(record([user("x" * 100)], key=f"k{number}"))
    assert recorder.flush()
    stats = recorder.stats
    assert stats.written + stats.dropped == 30
    assert 1000 <= stats.bytes_written < 2000
    recorder.close()
    again = recorders(tmp_path, max_bytes=1000)
    again.turn_finished(record([user("y")], key="z"))
    assert again.flush()
    assert again.stats == RecorderStats(dropped=1)


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecorderError, match="cannot be recorded in"):
        Recorder(RecorderConfig(tmp_path / "file" / "x"))


def test_lines_start_the_way_a_torn_one_is_recognised(tmp_path, recorders):
    recorder = recorders(tmp_path)
    recorder.turn_finished(record([user("1")]))
    recorder.close()
    (file,) = tmp_path.glob("*.jsonl")
    assert file.read_bytes().startswith(b'{"v":1,')
    assert decode_line(file.read_bytes()).session == "a"
