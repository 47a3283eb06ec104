"""`turnkeep explain` on recordings: made ones whose misses are known, the bundled ones, and those of real agents."""

import copy
import json

import pytest
from click.testing import CliRunner

import cli.explain
from gateway.config import ModelConfig
from gateway.models import ServedModel
from tests.shared_data import shared_traces
from traces.explain import Explainer
from traces.format import TurnLine, Usage
from traces.history import rebuild
from traces.index import expand_paths, index_files

SYSTEM = "You look after a warehouse. It is {} now. Be brief, and say so when you do not know something."


@pytest.fixture(scope="module")
def model(smollm2_dir):
    return ServedModel.load(ModelConfig("smollm2", smollm2_dir))


def line(turn, messages, *, keep=None, answer="There are 1,204 of them.", **fields):
    return TurnLine(
        v=1,
        session="s",
        turn=turn,
        messages=tuple(messages),
        assistant={"role": "assistant", "content": answer} if isinstance(answer, str) else answer,
        output_tokens=9,
        keep=keep,
        **fields,
    )


def user(text):
    return {"role": "user", "content": text}


def explained(model, *lines, **settings):
    return list(Explainer(model, **settings).session("s", rebuild(lines)))


def test_a_session_that_goes_on_loses_nothing(model):
    turns = explained(model, line(0, [user("How many bolts?")]), line(1, [user("And nuts?")]), line(2, [user("And screws?")]))
    assert [turn.miss for turn in turns] == [None, None, None]
    assert turns[1].shared_tokens >= turns[0].prompt_tokens
    assert turns[2].prompt_tokens > turns[2].shared_tokens > turns[1].prompt_tokens


def test_a_clock_in_the_system_prompt(model):
    def system(time):
        return {"role": "system", "content": SYSTEM.format(time)}

    times = ("12:00:01", "12:00:09", "12:03:44")
    history = [user("How many bolts are left?")]
    lines = []
    for number, time in enumerate(times):
        lines.append(line(number, [system(time), *copy.deepcopy(history)], keep=0 if number else None))
        history += [lines[-1].assistant, user(f"And number {number}?")]
    turns = explained(model, *lines, tokens_per_second=100.0)
    assert [turn.miss and turn.miss.cause for turn in turns] == [None, "timestamp", "timestamp"]
    miss = turns[1].miss
    assert miss.path == "messages[0].content"
    assert miss.field_bytes == SYSTEM.index("{}") + 7
    assert "It is 12:00:01 now" in miss.before
    assert "It is 12:00:09 now" in miss.after
    text = model.renderer.render((system(times[1]), *history[:1]))
    assert miss.text_bytes <= text.index("9 now") <= miss.text_bytes + 8  # a token may be longer than the byte that differs
    assert miss.lost_seconds == miss.lost_tokens / 100.0
    assert turns[2].miss.lost_tokens > miss.lost_tokens  # there was more to lose


@pytest.mark.parametrize(
    ("cause", "second"),
    [
        ("history_edited", {"keep": 0, "messages": [user("How many nuts are there, in all of the aisles? " * 6)]}),
        ("tools_added", {"messages": [user("more?")], "tools": ({"type": "function", "function": {"name": "count"}},)}),
        (
            "compacted",
            {"keep": 0, "messages": [user("Bolts: 1,204, and nuts: 96, of which the most are of size M4, in aisle 3.")]},
        ),
    ],
)
def test_other_causes(model, cause, second):
    first = line(0, [user("How many bolts are there? " * 10), {"role": "assistant", "content": "Many."}, user("Sure?")])
    turns = explained(model, first, line(1, **second))
    assert turns[1].miss.cause == cause


def test_what_nobody_computes_again_is_not_lost(model):
    first = line(0, [user("How many bolts are there? " * 10), {"role": "assistant", "content": "Many."}, user("Sure? " * 30)])
    turns = explained(model, first, line(1, [], keep=1), line(2, [user("Nuts, then? " * 20)], keep=0, answer="Few. " * 200))
    assert turns[1].miss is None
    assert turns[1].prompt_tokens - turns[1].shared_tokens < 16
    assert turns[2].miss.cause == "history_edited"
    assert 16 <= turns[2].miss.lost_tokens <= turns[2].prompt_tokens - turns[2].shared_tokens


def test_reasoning_that_was_dropped_and_arguments_written_otherwise(model):
    call = {"id": "c", "type": "function", "function": {"name": "count", "arguments": '{"sku": "M4", "aisle": 3}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    again = copy.deepcopy(said)
    again["tool_calls"][0]["function"]["arguments"] = '{"aisle": 3, "sku": "M4"}'
    tools = ({"type": "function", "function": {"name": "count"}},)
    turns = explained(
        model,
        line(0, [user("How many?")], answer=said, tools=tools),
        line(1, [again, {"role": "tool", "tool_call_id": "c", "content": "1,204"}], keep=1),
    )
    assert (turns[1].miss.cause, turns[1].miss.path) == (
        "arguments_reserialised",
        "messages[1].tool_calls[0].function.arguments",
    )
    thought = "<think>" + "I must count them one by one. " * 5 + "</think>There are 1,204."
    turns = explained(
        model,
        line(0, [user("How many?")], answer=thought),
        line(1, [{"role": "assistant", "content": "There are 1,204."}, user("Sure?")], keep=1),
    )
    assert turns[1].miss.cause == "reasoning_dropped"


def test_what_the_server_says_it_computed_again(model):
    def used(prompt, cached):
        return Usage(prompt_tokens=prompt, completion_tokens=9, cached_tokens=cached)

    turns = explained(model, line(0, [user("How many?")], usage=used(500, 0)), line(1, [user("Sure?")], usage=used(530, 96)))
    assert (turns[1].miss.cause, turns[1].miss.lost_tokens, turns[1].prompt_tokens) == ("evicted", 496 - 96, 530)


def test_a_turn_that_cannot_be_rendered_is_named_and_the_rest_goes_on(model):
    bad = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    turns = explained(model, line(0, [user("a")]), line(1, [bad]), line(2, [user("c")], keep=1), line(3, [user("d")]))
    assert [turn.problem is None for turn in turns] == [True, False, True, True]
    assert "an image" in turns[1].problem


def test_without_excerpts_no_text_is_shown(model):
    lines = line(0, [user("How many bolts are there? " * 5)]), line(1, [user("Something secret " * 9)], keep=0)
    [_, turn] = explained(model, *lines, excerpts=False)
    assert (turn.miss.before, turn.miss.after) == ("", "")


def test_the_bundled_sessions_lose_nothing(model):
    explainer = Explainer(model)
    entries = index_files(expand_paths(["traces/bundled"]))[:3]
    for entry in entries:
        for turn in explainer.session(entry.session, entry.read()):
            assert turn.problem is None
            assert turn.miss is None, turn


def test_the_command(model, smollm2_dir, tmp_path):
    path = tmp_path / "s.jsonl"
    message = [{"role": "system", "content": SYSTEM.format("12:00:01")}, user("How many bolts are left? " * 4)]
    answer = {"role": "assistant", "content": "Many."}
    lines = []
    for turn, time in enumerate(("12:00:01", "12:00:02", "12:00:03")):
        message[0] = {"role": "system", "content": SYSTEM.format(time)}
        lines.append(
            {"v": 1, "session": "[s]", "turn": turn, "messages": [*message], "assistant": answer, "output_tokens": 2}
            | ({"keep": 0} if turn else {})
        )
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    arguments = [str(path), "--model", str(smollm2_dir), "--tokens-per-second", "1000"]
    result = CliRunner().invoke(cli.explain.command, arguments, terminal_width=200)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "[s] turn 1: timestamp at messages[0].content byte 41" in text
    assert "advice: a time at messages[0].content changes with every turn" in text
    assert "3 turns" in text
    found = json.loads(CliRunner().invoke(cli.explain.command, [*arguments, "--json"]).output)
    assert [turn["miss"] and turn["miss"]["cause"] for turn in found[0]["turns"]] == [None, "timestamp", "timestamp"]
    assert found[0]["advice"][0]["times"] == 2
    result = CliRunner().invoke(cli.explain.command, [*arguments, "--session", "other"])
    assert result.exit_code == 2
    assert "There is no session other" in result.output
    path.write_text("{}\n")
    result = CliRunner().invoke(cli.explain.command, arguments)
    assert (result.exit_code, "s.jsonl" in result.output) == (1, True)


def test_sessions_of_tenants_are_found_by_their_bare_names(smollm2_dir, tmp_path):
    """And what is piped is not broken into lines of some width."""
    path = tmp_path / "s.jsonl"
    lines = []
    for session in ("555d6577:ed", "555d6577:both", "a0b1c2d3:both", "plain", "555d6577:plain"):
        for turn, time in enumerate(("12:00:01", "12:00:02")):
            messages = [{"role": "system", "content": SYSTEM.format(time)}, user("How many bolts are left? " * 4)]
            answer = {"role": "assistant", "content": "Many."}
            keep = {"keep": 0} if turn else {}
            lines.append(
                {"v": 1, "session": session, "turn": turn, "messages": messages, "assistant": answer, "output_tokens": 2} | keep
            )
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))

    def run(*sessions):
        options = [part for name in sessions for part in ("--session", name)]
        return CliRunner().invoke(cli.explain.command, [str(path), "--model", str(smollm2_dir), *options])

    result = run("ed")
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.output.splitlines() if "timestamp at" in line]
    assert line.startswith("555d6577:ed turn 1: timestamp at messages[0].content byte 41 (prompt: byte ")
    assert line.endswith(" tokens again")
    assert max(map(len, result.output.splitlines())) < 300  # no line is filled up to a width either
    both = run("both")
    assert both.exit_code == 2
    assert "555d6577:both, a0b1c2d3:both" in " ".join(both.output.split())
    exact = run("plain")
    assert "plain turn 1" in exact.output
    assert "555d6577:plain" not in exact.output
    assert run("d").exit_code == 2


def test_recorded_agents_of_others(model):
    """Prompts of tau-bench agents, made into turns: an agent that only appends loses nothing but what its template rewrites."""
    folder = shared_traces("tau_bench")
    rows = json.loads((folder / "gpt-4o-airline.json").read_text())
    looked_at = 0
    for row in rows[:6]:
        messages = row["traj"]
        lines, sent = [], 0
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and at > sent:
                new = [{k: v for k, v in m.items() if v is not None} for m in messages[sent:at]]
                lines.append(line(len(lines), new, answer={k: v for k, v in message.items() if v is not None}))
                sent = at + 1
        turns = explained(model, *lines)
        looked_at += len(turns)
        assert all(turn.problem is None for turn in turns)
        assert all(turn.miss is None or turn.miss.cause == "template" for turn in turns), turns
    assert looked_at > 10
