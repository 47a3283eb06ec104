"""The stop matcher against a plain reading of the whole text, however the text is cut."""

import subprocess
import sys
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from grammar.detokenizer import Detokenizer
from grammar.stop import StopMatcher, TextStream


def occurrences(text, patterns, start):
    """(end, begin, pattern) of every occurrence at or after `start`: first complete first, of those the longest."""
    found = []
    for pattern in patterns:
        begin = text.find(pattern, start)
        while begin >= 0:
            found.append((begin + len(pattern), begin, pattern))
            begin = text.find(pattern, begin + 1)
    return sorted(found)


def oracle(text, stops, exempt, armed_from=0):
    """The definition of grammar.stop, on the whole text: what is left of it, and the stop string that cut it."""
    start = 0
    while True:
        begins = occurrences(text, [begin for begin, _ in exempt], start)
        limit = begins[0][1] if begins else len(text)
        for end, begin, stop in occurrences(text, stops, start):
            if end <= limit and end > armed_from:
                return text[:begin], stop
        if not begins:
            return text, None
        opened = begins[0][2]
        closing = next(end for begin, end in exempt if begin == opened)
        closed = text.find(closing, begins[0][0])
        if closed < 0:
            return text, None
        start = closed + len(closing)


def run(text, stops, exempt, sizes, armed_from=0):
    """Feeds the text in pieces of these sizes, cut again where it becomes armed."""
    matcher = StopMatcher(stops, exempt)
    out, position, sizes = "", 0, list(sizes)
    while position < len(text):
        end = min(position + (sizes.pop() if sizes else 1), len(text))
        if position < armed_from:
            end = min(end, armed_from)
        given_out, matched = matcher.feed(text[position:end], armed=position >= armed_from)
        out += given_out
        assert matched == matcher.matched
        if matched is not None:
            assert matcher.feed("more") == ("", matched)
            assert matcher.finish() == ""
            return out, matched
        longest = max(map(len, stops), default=0) + max((len(begin) for begin, _ in exempt), default=0)
        assert len(out) >= end - longest, "too much was held back"
        position = end
    return out + matcher.finish(), matcher.matched


ABC = st.text("ab<", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab<>", max_size=40),
    stops=st.lists(ABC, max_size=4),
    exempt=st.lists(st.tuples(ABC, st.text("ab>", min_size=1, max_size=3)), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    armed_from=st.integers(0, 12),
)
@example(text="<<<t", stops=["<<<"], exempt=[("<<<t>", "x"), ("t", "x")], sizes=[], armed_from=0)
@example(text="aab", stops=["aab", "ab", "b"], exempt=[], sizes=[3], armed_from=0)
@example(text="<", stops=["<"], exempt=[("<a", "b")], sizes=[], armed_from=0)
def test_any_cut_gives_what_the_whole_text_gives(text, stops, exempt, sizes, armed_from):
    assert run(text, stops, exempt, sizes, armed_from) == oracle(text, stops, exempt, armed_from)


def test_long_random_texts_give_what_the_whole_text_gives():
    random = Random(7)
    fired = regions = 0
    for _ in range(3000):
        text = "".join(random.choice("ab<>\n") for _ in range(random.randrange(60)))
        stops = ["".join(random.choice("ab<>\n") for _ in range(random.randrange(1, 6))) for _ in range(random.randrange(4))]
        exempt = [("<a", ">"), ("<<", "a>")][: random.randrange(3)]
        expected = oracle(text, stops, exempt)
        fired += expected[1] is not None
        regions += any(begin in text for begin, _ in exempt)
        assert run(text, stops, exempt, [random.randrange(6) for _ in range(20)]) == expected
    assert fired > 500
    assert regions > 500


def fed(matcher, *pieces):
    return [matcher.feed(piece)[0] for piece in pieces]


def test_text_that_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["\nObservation:"])
    assert fed(matcher, "Thought\n", "Obs", "erve ", "\nObservation", ":x") == ["Thought", "", "\nObserve ", "", ""]
    assert matcher.matched == "\nObservation:"
    assert matcher.finish() == ""


def test_held_text_comes_out_at_the_end():
    matcher = StopMatcher(["END"])
    assert fed(matcher, "the E", "N") == ["the ", ""]
    assert matcher.finish() == "EN"
    assert matcher.matched is None
    assert matcher.feed("D") == ("", None)
    assert matcher.finish() == ""


def test_the_match_that_is_complete_first_wins():
    assert StopMatcher(["abcd", "bc"]).feed("xabcd") == ("xa", "bc")
    assert StopMatcher(["ab", "abc"]).feed("xabc") == ("x", "ab")


def test_of_several_complete_at_once_the_longest_wins():
    for stops in (["c", "abc", "bc"], ["abc", "bc", "c"]):
        assert StopMatcher(stops).feed("xabc") == ("x", "abc")


CALL = ("<tool_call>", "</tool_call>")


def test_stop_strings_do_not_fire_inside_exempt_regions():
    text = 'Let me look.<tool_call>\n{"a": "b"}\n</tool_call>\nmore'
    for size in (1, 2, 3, 5, 8, len(text)):
        matcher = StopMatcher(["\n", "}"], [CALL])
        out = "".join(matcher.feed(text[at : at + size])[0] for at in range(0, len(text), size))
        assert out == 'Let me look.<tool_call>\n{"a": "b"}\n</tool_call>'
        assert matcher.matched == "\n"


def test_a_stop_string_that_could_begin_a_region_waits_for_the_next_characters():
    matcher = StopMatcher(["<"], [CALL])
    assert fed(matcher, "a <", "tool", "_call>", "{<}") == ["a ", "", "<tool_call>", "{<}"]
    matcher = StopMatcher(["<"], [CALL])
    assert [matcher.feed(piece) for piece in ("a <", "tools")] == [("a ", None), ("", "<")]


def test_a_stop_string_held_at_the_end_of_the_text_fires():
    matcher = StopMatcher(["x<"], [CALL])
    assert matcher.feed("ax<to") == ("a", None)
    assert matcher.finish() == ""
    assert matcher.matched == "x<"


def test_an_unclosed_region_is_exempt_to_the_end():
    matcher = StopMatcher(["\n"], [CALL])
    assert matcher.feed("<tool_call>\n\n") == ("<tool_call>\n\n", None)
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_without_stop_strings_text_passes():
    matcher = StopMatcher([], [CALL])
    assert fed(matcher, "a <tool", "_call> b") == ["a <tool", "_call> b"]


@pytest.mark.parametrize(("stops", "exempt"), [([""], []), (["a", ""], []), ([], [("", "b")]), ([], [("a", "")])])
def test_empty_texts_are_refused(stops, exempt):
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(stops, exempt)


def test_many_long_stop_strings_cost_linear_time():
    """A pattern that nearly matches everywhere: the held text must not be searched again for every character."""
    matcher = StopMatcher(["a" * 2000 + "b", "a" * 1000 + "c"])
    text = "a" * 100_000
    out = "".join(matcher.feed(text[at : at + 10])[0] for at in range(0, len(text), 10))
    assert len(out) == 100_000 - 2000
    assert len(matcher.finish()) == 2000


def character_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate("abc<>")}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


CHARACTERS = Detokenizer(character_tokenizer())


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc<>", max_size=20),
    stops=st.lists(st.text("abc<", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    min_tokens=st.integers(0, 8),
)
def test_token_streams_give_what_the_whole_text_gives(text, stops, sizes, min_tokens):
    """One token a character: the text of the first `min_tokens` tokens is not searched."""
    stream = TextStream(CHARACTERS.fresh(), stops, [("<a", ">")], min_tokens=min_tokens)
    ids = ["abc<>".index(character) for character in text]
    out = ""
    while ids and stream.matched is None:
        size = sizes.pop() if sizes else 1
        out += stream.feed(ids[:size])[0]
        ids = ids[size:]
    out += stream.finish()
    assert (out, stream.matched) == oracle(text, stops, [("<a", ">")], armed_from=min_tokens)
    assert stream.finish() == ""


def test_a_stop_string_across_tokens_of_half_characters():
    """A stop string whose character comes in four byte tokens, with more text in the token that completes it."""
    vocab = {f"<0x{byte:02X}>": index for index, byte in enumerate("😀".encode())} | {"x": 4, "a": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = TextStream(Detokenizer(tokenizer), ["😀x"])
    assert [stream.feed([token_id]) for token_id in (5, 0, 1, 2, 3, 4)] == [("a", None), *[("", None)] * 4, ("", "😀x")]


def test_neither_module_imports_torch():
    code = "import sys, grammar.stop, grammar.detokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_fires_before_the_text_that_reasoning_ends_with():
    for cut in range(20):
        text = "a STOP b</think>c STOP d"
        matcher = StopMatcher(["STOP"], [("<x>", "</x>")], after="</think>")
        given = matcher.feed(text[:cut])[0] + matcher.feed(text[cut:])[0]
        assert given == "a STOP b</think>c "
        assert matcher.matched == "STOP"
