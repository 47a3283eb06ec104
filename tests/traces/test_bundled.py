"""The bundled sessions: whole, replayable, shared where they say so, and nobody's machine in them."""

from __future__ import annotations

import itertools
import re

import pytest

from traces.index import expand_paths, index_files
from traces.record_samples import BUNDLED, MAX_TOKENS
from traces.sample_tasks import TASKS


@pytest.fixture(scope="module")
def sessions():
    return {entry.session: list(entry.read()) for entry in index_files(expand_paths([BUNDLED]))}


def test_every_task_is_there_and_nothing_else(sessions):
    assert set(sessions) == {task.name for task in TASKS}
    assert len(sessions) >= 12
    assert all(len(sessions[task.name]) == len(task.steps) >= 8 for task in TASKS)


def test_sessions_of_one_kind_share_their_system_prompt_and_tools(sessions):
    heads = {}
    for task in TASKS:
        first = sessions[task.name][0]
        heads.setdefault(task.kind.name, set()).add((first.messages[0]["content"], str(first.tools)))
    assert {kind: len(found) for kind, found in heads.items()} == {"engineer": 1, "analyst": 1, "support": 1}


def test_scripts_are_named_and_results_answer_their_calls(sessions):
    for task in TASKS:
        turns = sessions[task.name]
        for step, turn in zip(task.steps, turns, strict=True):
            expected = () if step.tool is None else ("tool",) if step.arguments is None else ("tool", "arguments")
            assert turn.line.scripted[: len(expected)] == expected
            assert 1 <= turn.line.output_tokens <= MAX_TOKENS
            calls = turn.line.assistant.get("tool_calls", [])
            assert [call["function"]["name"] for call in calls] == ([step.tool] if step.tool else [])
        for turn, following in itertools.pairwise(turns):
            asked = [call["id"] for call in turn.line.assistant.get("tool_calls", [])]
            answered = [message["tool_call_id"] for message in following.line.messages if message["role"] == "tool"]
            assert asked == answered
            assert following.line.keep is None


def test_sessions_grow_to_a_few_thousand_tokens(sessions):
    for turns in sessions.values():
        prompts = [turn.line.usage.prompt_tokens for turn in turns]
        assert prompts == sorted(prompts)
        assert 2000 <= prompts[-1] + turns[-1].line.output_tokens <= 5000


def test_nothing_of_a_machine_is_in_them():
    for path in BUNDLED.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|usr|var|Users|private)/", text), path.name
        assert not re.search(r"started_at|\.sqlite|127\.0\.0\.1|localhost", text), path.name
