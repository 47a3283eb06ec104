"""Sources of before: kept within bounds, found again, and compiled before anybody asks."""

import os

import pytest
from hermes_walking import HERMES, LOGITS, STOPS, closed, source_for

from grammar.compiler import GrammarCompiler
from grammar.known_sources import KnownLimits, KnownSources
from grammar.tools import GrammarRefused, Tool
from grammar.warming import SHARED, warm_up


def known_at(path, **limits):
    return KnownSources(path, b"vocabulary", KnownLimits(**{"worth_milliseconds": 0.0, "least_bytes": 1, **limits}))


def used_at(path, known, source, seconds):
    """Uses a source and says that it was then."""
    before = set(path.rglob("*"))
    known.compiled(source, 100.0)
    for file in set(path.rglob("*")) - before:
        if file.is_file():
            os.utime(file, (seconds, seconds))


def test_what_took_long_is_found_again_last_used_first(tmp_path):
    known = KnownSources(tmp_path, b"v", KnownLimits(worth_milliseconds=20, least_bytes=4))
    known.compiled("abc", 100.0)
    used_at(tmp_path, known, "fast", 1)
    assert list(known.all()) == ["fast"]
    known.compiled("too fast", 19.9)
    assert list(known.all()) == ["fast"]
    used_at(tmp_path, known, "slow é", 2)
    assert list(known.all()) == ["slow é", "fast"]
    known.compiled("fast", 20.0)  # once more, now
    assert KnownLimits().least_bytes > len(SHARED)
    assert list(KnownSources(tmp_path, b"v").all()) == ["fast", "slow é"]
    assert list(KnownSources(tmp_path, b"another vocabulary").all()) == []


def test_it_is_bounded_by_number_and_bytes(tmp_path):
    known = known_at(tmp_path, entries=3, bytes=100)
    for number in range(5):
        used_at(tmp_path, known, f"source {number}", number)
    assert list(known.all()) == ["source 4", "source 3", "source 2"]
    used_at(tmp_path, known, "x" * 90, 9)
    assert list(known.all()) == ["x" * 90, "source 4"]
    known.compiled("y" * 101, 1.0)
    assert list(known.all()) == ["x" * 90, "source 4"]


def test_what_was_damaged_or_cannot_be_written_is_left_out(tmp_path, caplog):
    known = known_at(tmp_path)
    known.compiled("good", 1.0)
    known.compiled("damaged", 1.0)
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o077 == 0
    next(file for file in directory.iterdir() if file.read_bytes() == b"damaged").write_bytes(b"dama\xff")
    assert list(known.all()) == ["good"]
    (tmp_path / "file").write_text("")
    known_at(tmp_path / "file").compiled("nowhere", 1.0)
    assert "could not be kept" in caplog.text


def test_a_second_start_compiles_what_the_first_was_asked_for(tokenizer_json, tmp_path, monkeypatch):
    first = GrammarCompiler(tokenizer_json, LOGITS, STOPS, known=known_at(tmp_path))
    source = HERMES.structural_tag([Tool(f"t{i}", parameters=closed(a={"type": "integer", "minimum": i})) for i in range(9)])
    first.compile(source)
    with pytest.raises(GrammarRefused):
        first.compile("no grammar")
    first.close()
    known = known_at(tmp_path)
    assert list(known.all()) == [source]
    second = GrammarCompiler(tokenizer_json, LOGITS, STOPS, known=known)
    lowered = []
    import grammar.compiler as compiler_module

    lower = compiler_module.lower
    monkeypatch.setattr(compiler_module, "lower", lambda *given: lowered.append(given) or lower(*given))
    warm_up(second, known.all()).join(60)
    try:
        assert len(lowered) == 2  # that list, and what strings share
        assert second._prober._helper.alive()
        second.compile(source)
        second.compile(SHARED)
        assert len(lowered) == 2
    finally:
        second.close()


def test_a_closed_compiler_ends_its_warm_up(tokenizer_json):
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    compiler.close()
    warm_up(compiler, [source_for(0)]).join(60)
    assert not compiler._known
    assert compiler._prober._helper is None


def test_a_source_that_is_refused_now_does_not_end_the_warm_up(tokenizer_json, caplog):
    caplog.set_level("INFO")
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    warm_up(compiler, ["no grammar", source_for(0)]).join(60)
    compiler.close()
    assert "cannot be compiled any more: The grammar is not valid JSON" in caplog.text
    assert "1 grammars of before are compiled again" in caplog.text
