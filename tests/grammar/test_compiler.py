"""Sources to compiled grammars: what is refused, what is kept, and that each is compiled once."""

import threading

import pytest
from hermes_walking import LOGITS, STOPS, source_for

import grammar.compiler as compiler_module
from grammar.compiler import GrammarCompiler
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.tools import GrammarRefused


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "must be a structural tag"),
        ('{"type": "structural_tag"}', "must be a structural tag"),
        ('{"type": "structural_tag", "format": {"type": "nonsense"}}', "cannot be compiled"),
        ('{"type": "structural_tag", "format": {"type": "json_schema"}}', "json_schema without a schema"),
        ('{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": false}}', "allows no value"),
        (
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"title": "t", "type": "dict"}}}',
            "tool 't'",
        ),
        ('{"type": "structural_tag", "format": ' + '{"a": ' * 400 + "{}" + "}" * 400 + "}", "nests more than 64 formats"),
        ('{"type": "structural_tag", "format": ' + "[" * 100_000, "not valid JSON"),
        ("x" * (DEFAULT_LIMITS.max_source_bytes + 1), "at most 8388608 are allowed"),
    ],
)
def test_sources_that_are_no_grammars_are_refused(compiler, source, words):
    for _ in range(2):  # the second answer comes from the cache
        with pytest.raises(GrammarRefused) as refused:
            compiler.compile(source)
        assert words in refused.value.message
        assert refused.value.message[-1] in ".?"


def test_the_cache_is_bounded(tokenizer_json, monkeypatch):
    limits = GrammarLimits(cache_entries=4)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    first = compiler.compile(source_for(0))
    for i in range(1, 4):
        compiler.compile(source_for(i))
    assert compiler.compile(source_for(0)) is first  # used again, so it outlives the others
    for i in range(4, 7):
        compiler.compile(source_for(i))
    assert compiler.compile(source_for(0)) is first
    with pytest.raises(GrammarRefused):
        compiler.compile("no grammar")
    compiler.compile(source_for(7))
    compiler.compile(source_for(8))
    compiler.compile(source_for(9))
    assert compiler.compile(source_for(0)) is not first
    small = GrammarCompiler(tokenizer_json, LOGITS, STOPS, GrammarLimits(cache_bytes=1))
    again = small.compile(source_for(0))
    assert again.memory_bytes > 1
    assert small.compile(source_for(0)) is not again


def test_one_source_is_compiled_once_for_all_threads(tokenizer_json, monkeypatch):
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    started, release, lowered = threading.Event(), threading.Event(), []
    lower = compiler_module.lower

    def slow_lower(parsed_source, *rest):
        lowered.append(parsed_source)
        started.set()
        assert release.wait(20)
        return lower(parsed_source, *rest)

    monkeypatch.setattr(compiler_module, "lower", slow_lower)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(compiler.compile(source_for(0)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 8
    assert len({id(answer) for answer in answers}) == 1
    assert len(lowered) == 1


def test_an_error_that_is_no_refusal_is_not_remembered(tokenizer_json, monkeypatch):
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    lower = compiler_module.lower
    monkeypatch.setattr(compiler_module, "lower", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        compiler.compile(source_for(0))
    monkeypatch.setattr(compiler_module, "lower", lower)
    assert compiler.compile(source_for(0)).memory_bytes > 0
