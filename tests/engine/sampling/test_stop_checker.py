"""When a generation ends, and what is said about it."""

import pytest
from tokenizers import Tokenizer, decoders, models

from engine.sampling.stopping import StopChecker, StopDecision
from gateway.workers.protocol import SamplingParams
from grammar.detokenizer import Detokenizer

EOS, BREAK = 0, 1
WORDS = ["</s>", "<break>", "a", "b", "<", "<tool>", "</tool>", "ab"]


def detokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return Detokenizer(tokenizer)


def decisions(params, tokens, **limits):
    """What is said after each token, up to the first decision."""
    checker = StopChecker(params, (EOS,), detokenizer() if params.stop else None, **limits)
    said = []
    for count, token in enumerate(tokens, start=1):
        said.append(checker.append(WORDS.index(token)))
        assert checker.generated == count
        if said[-1] is not None:
            break
    return said


def last(params, tokens, **limits):
    """The decision that the very last of these tokens brings about."""
    said = decisions(params, tokens, **limits)
    assert len(said) == len(tokens)
    assert said[:-1] == [None] * (len(tokens) - 1)
    return said[-1]


def test_eos_ends_without_a_reason():
    assert last(SamplingParams(), ["a", "b", "</s>"]) == StopDecision("stop", None)


def test_ignored_eos_goes_on():
    assert last(SamplingParams(ignore_eos=True), ["a", "</s>", "a"]) is None


def test_a_stop_id_is_the_reason():
    params = SamplingParams(stop_token_ids=(BREAK,))
    assert last(params, ["a", "<break>"]) == StopDecision("stop", BREAK)


def test_an_ignored_eos_among_the_stop_ids_stops():
    params = SamplingParams(ignore_eos=True, stop_token_ids=(EOS,))
    assert last(params, ["a", "</s>"]) == StopDecision("stop", EOS)


def test_max_tokens():
    assert last(SamplingParams(max_tokens=3), ["a", "a", "a"]) == StopDecision("length")


@pytest.mark.parametrize(("prompt_tokens", "max_total"), [(10, 12), (0, 2)])
def test_the_context_ends(prompt_tokens, max_total):
    params = SamplingParams(max_tokens=5)
    assert last(params, ["a", "a"], prompt_tokens=prompt_tokens, max_total=max_total) == StopDecision("length")


def test_a_stop_at_the_length_is_a_stop():
    params = SamplingParams(max_tokens=2, stop=("b",), stop_token_ids=(BREAK,))
    assert last(params, ["a", "</s>"]) == StopDecision("stop", None)
    assert last(params, ["a", "<break>"]) == StopDecision("stop", BREAK)
    assert last(params, ["a", "b"]) == StopDecision("stop", "b")


def test_a_stop_string_across_tokens():
    assert last(SamplingParams(stop=("aab", "x")), ["b", "a", "ab"]) == StopDecision("stop", "aab")


def test_stop_strings_do_not_count_in_the_first_min_tokens():
    params = SamplingParams(stop=("b",), min_tokens=2)
    assert last(params, ["b", "b", "a", "b"]) == StopDecision("stop", "b")


def test_a_stop_string_that_began_before_min_tokens_counts_when_it_ends_after():
    assert last(SamplingParams(stop=("bb",), min_tokens=2), ["b", "b", "b"]) == StopDecision("stop", "bb")


def test_a_forced_end_counts_before_min_tokens():
    """A grammar that allows nothing else can bring EOS earlier; nothing can follow it."""
    assert last(SamplingParams(min_tokens=5), ["a", "</s>"]) == StopDecision("stop", None)
    assert last(SamplingParams(min_tokens=5, stop_token_ids=(BREAK,)), ["<break>"]) == StopDecision("stop", BREAK)


def test_the_length_counts_before_min_tokens():
    assert last(SamplingParams(min_tokens=5, max_tokens=5), ["a"] * 3, prompt_tokens=1, max_total=4) == StopDecision("length")


EXEMPT = SamplingParams(stop=("b", "<"), stop_exempt=(("<tool>", "</tool>"),))


def test_stop_strings_do_not_fire_in_exempt_regions():
    tokens = ["a", "<tool>", "b", "<", "</tool>", "a", "b"]
    assert last(EXEMPT, tokens) == StopDecision("stop", "b")


def test_a_stop_string_that_may_begin_a_region_is_decided_at_the_next_token():
    assert decisions(EXEMPT, ["a", "<", "a", "a"]) == [None, None, StopDecision("stop", "<")]


@pytest.mark.parametrize(
    ("tokens", "max_tokens"),
    [(["a", "<"], 2), (["a", "<", "</s>"], None), (["a", "<", "<break>"], None)],
    ids=["length", "eos", "stop id"],
)
def test_a_stop_string_undecided_at_the_end_fires(tokens, max_tokens):
    params = SamplingParams(stop=("<",), stop_exempt=(("<tool>", "</tool>"),), max_tokens=max_tokens, stop_token_ids=(BREAK,))
    assert last(params, tokens) == StopDecision("stop", "<")


def test_a_stop_id_has_no_text():
    """The stop string would need the stop token's text, which is not part of the answer."""
    assert last(SamplingParams(stop=("a<break>",), stop_token_ids=(BREAK,)), ["a", "<break>"]) == StopDecision("stop", BREAK)


def test_stop_strings_need_a_detokenizer():
    with pytest.raises(ValueError, match="need a detokenizer"):
        StopChecker(SamplingParams(stop=("a",)), (EOS,))
