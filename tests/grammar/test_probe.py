"""Compiling in a process that can be killed: what never ends, what dies, and what is left running (nothing)."""

import json
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hermes_walking import HERMES, LOGITS, STOPS, closed, source_for

from grammar.compiler import GrammarCompiler, allocate_bitmask
from grammar.limits import GrammarLimits
from grammar.tools import GrammarRefused, Tool, ToolChoice

RUNAWAY = closed(a={"type": "string", "pattern": "^([a-z0-9]{0,30}-){0,30}$"})
"""Takes XGrammar far longer than the deadline below."""


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in listed.stdout.split()]


def test_a_runaway_compile_is_killed_and_refused(tokenizer_json):
    """By what it computes, however busy the machine is; and by the clock."""
    limits = GrammarLimits(probe_deadline_seconds=600.0, probe_processor_seconds=1.0, cheap_milliseconds=200.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    try:
        source = HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)], ToolChoice("required"))
        with pytest.raises(GrammarRefused, match=r"takes more than 1 seconds to compile; send fewer or simpler tools\.$"):
            compiler.compile(source)
        helper = compiler._prober._helper._process
        assert children_of(helper.pid) == []
        assert isinstance(next(iter(compiler._known.values())), GrammarRefused)  # remembered
        # What needs a trial and passes it is compiled.
        middling = HERMES.structural_tag(
            [Tool("middling", parameters=closed(a={"type": "string", "pattern": "^[a-z]{0,20}$"}))]
        )
        assert compiler.compile(middling).memory_bytes > 0
    finally:
        compiler.close()
    assert helper.poll() is not None
    compiler.close()
    late = GrammarCompiler(
        tokenizer_json, LOGITS, STOPS, replace(limits, probe_deadline_seconds=0.25, probe_processor_seconds=60.0)
    )
    try:
        with pytest.raises(GrammarRefused, match=r"takes more than 0\.25 seconds to compile"):
            late.compile(source)
    finally:
        late.close()


def ebnf(text):
    return json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": text}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= ("a" | "b" | [c-z]{0,30}){0,9999}', "takes more than"),  # a mask of it takes a second
        ('root ::= s\ns ::= s s | s s s | "a" | [a-z] | ""', "takes more than|ms a token, which would hold up other requests"),
        ("root ::= " + "a " * 40 + "\na ::= [a-z]*", "takes more than|ms a token, which would hold up other requests"),
        ("root ::= root", "comes to a place where nothing may follow"),
        ('root ::= "yes" | "no"', None),
        ('root ::= item ("," item)*\nitem ::= [a-z]{1,20}', None),
    ],
)
def test_a_grammar_whose_masks_are_slow_is_refused(compiler, text, words):
    """However little it takes to compile, its masks are made on the thread that all requests share."""
    if words is None:
        assert compiler.compile(ebnf(text)).memory_bytes > 0
    else:
        with pytest.raises(GrammarRefused, match=words):
            compiler.compile(ebnf(text))


def test_a_probe_that_dies_is_no_answer_and_is_started_again(tokenizer_json):
    limits = GrammarLimits(probe_deadline_seconds=30.0, probe_processor_seconds=30.0, cheap_milliseconds=0.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    try:
        compiler.compile(source_for(0))
        helper = compiler._prober._helper._process
        outcome = []

        def ask():
            try:
                compiler.compile(HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)]))
            except GrammarRefused as refused:
                outcome.append(refused.message)

        thread = threading.Thread(target=ask)
        thread.start()
        deadline = time.monotonic() + 20
        while not (running := children_of(helper.pid)) and time.monotonic() < deadline:
            thread.join(0.05)
        helper.kill()
        thread.join(20)
        for pid in running:  # orphaned by the kill, which close() would not have done
            os.kill(pid, 9)
        assert outcome == ["The grammar could not be tried: the process that tries grammars died; send the request again."]
        assert len(compiler._known) == 1
        assert compiler.compile(source_for(1)).memory_bytes > 0
        assert compiler._prober._helper._process.pid != helper.pid
    finally:
        compiler.close()
    with pytest.raises(GrammarRefused, match="the engine is stopping"):
        compiler.compile(source_for(2))


def test_a_trial_that_runs_holds_up_no_other_and_closing_ends_it(tokenizer_json):
    limits = GrammarLimits(probe_deadline_seconds=60.0, probe_processor_seconds=60.0, cheap_milliseconds=0.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    compiler.compile(source_for(0))
    helper = compiler._prober._helper._process
    refused = []

    def ask():
        try:
            compiler.compile(HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)]))
        except GrammarRefused as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 20
    while not (running := children_of(helper.pid)) and time.monotonic() < deadline:
        thread.join(0.05)
    # Meanwhile others are tried, compiled and walked along.
    matcher = compiler.compile(source_for(1)).matcher()
    matcher.fill_bitmask(allocate_bitmask(1, LOGITS), 0)
    assert thread.is_alive()
    assert refused == []
    compiler.close()
    thread.join(10)
    assert len(refused) == 1
    assert helper.poll() is not None
    assert running
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
