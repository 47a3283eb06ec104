"""One choice from tokens to deltas: the same however the tokens come, and nothing of a stop string in it."""

import json

import pytest
from fake_dispatcher import EOS
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.choices import ChoiceDecoder
from gateway.tokenization import TextTokenizer
from gateway.workers.protocol import Finished, TokenLogprob, Tokens
from grammar.detokenizer import Detokenizer
from grammar.formats.hermes import HermesFormat
from grammar.parser import TextParser
from grammar.stop import TextStream
from grammar.tools import Tool, ToolChoice

TOOLS = (Tool("f"), Tool("g"))


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return TextTokenizer.load(tiny_model)


def decoder(tokenizer, stops=(), *, tools=False, withheld=frozenset(), named=False, min_tokens=0):
    form = HermesFormat()
    ids = iter(f"call_{i}" for i in range(100))
    parser = form.parser(TOOLS, ToolChoice(), lambda: next(ids)) if tools else TextParser()
    stream = TextStream(Detokenizer(tokenizer.backend), stops, form.exempt_regions if tools else (), min_tokens=min_tokens)
    return ChoiceDecoder(0, stream, parser, withheld_ids=withheld, named_tool=named)


def run(decoder, ids, cuts, finished, *, logprobs=False):
    start = 0
    for end in [*sorted(cuts), len(ids)]:
        part = tuple(ids[start:end])
        start = end
        if part:
            decoder.feed(Tokens(part, 0, tuple(TokenLogprob(i, -1.0) for i in part) if logprobs else ()))
    return decoder.finish(finished)


def outcome(state):
    return (
        "".join(state.text),
        [(call.name, "".join(call.arguments), call.complete) for call in state.calls],
        state.finish_reason,
    )


pieces = st.lists(
    st.sampled_from(["a", "é", "🙂", "STOP", "ST", "OP", " ", "<tool_call>\n", '{"name": "f", "arguments": {"x": "STOP"}}'])
    | st.sampled_from(["\n</tool_call>", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "<", "\n"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=pieces, tools=st.booleans(), stops=st.sampled_from([(), ("STOP",), ("STOP", "a🙂")]), data=st.data())
def test_cuts_and_logprobs_do_not_matter(tokenizer, text, tools, stops, data):
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6, unique=True))
    whole, cut, tokenwise = (decoder(tokenizer, stops, tools=tools) for _ in range(3))
    run(whole, ids, [], Finished("length"))
    run(cut, ids, cuts, Finished("length"))
    run(tokenwise, ids, range(1, len(ids)), Finished("length"), logprobs=True)
    assert outcome(whole.state) == outcome(cut.state) == outcome(tokenwise.state)
    if not tools:
        said = "".join(whole.state.text)
        assert said == (min((text.split(stop)[0] for stop in stops), key=len) if stops else text) or len(stops) > 1
        # The tokens whose log-probabilities are out spell what is out, and nothing of the stop string.
        spelled = b"".join(tokenizer.token_bytes(item.token_id) for item in tokenwise.state.logprobs)
        assert said.encode().startswith(spelled) or spelled.decode("utf-8", "ignore") == said
    assert "".join(whole.state.text).find("STOP") == -1 or not stops or tools


def test_the_token_that_ends_it_is_no_text_and_has_no_logprob(tokenizer):
    z, eos = tokenizer.encode("z" + EOS, add_special_tokens=False)
    ids = tokenizer.encode("az", add_special_tokens=False)
    for stop_reason, finish, expected in [(z, "stop", "a"), (None, "length", "az")]:
        made = decoder(tokenizer, withheld=frozenset({z, eos}))
        run(made, ids, [], Finished(finish, 0, stop_reason), logprobs=True)
        assert "".join(made.state.text) == expected
        assert len(made.state.logprobs) == len(expected)
        assert made.state.token_ids == ids
    made = decoder(tokenizer, withheld=frozenset({z}))
    made.feed(Tokens(tuple(ids)))
    assert made.state.text == ["a"]
    made.feed(Tokens(tuple(ids)))
    assert "".join(made.state.text) == "aza"


def test_stop_strings_within_the_least_tokens_do_not_count(tokenizer):
    ids = tokenizer.encode("xSTOPySTOPz", add_special_tokens=False)
    made = decoder(tokenizer, ("STOP",), min_tokens=7)
    _, end = run(made, ids, [3], Finished("stop", 0, "STOP"))
    assert "".join(made.state.text) == "xSTOPy"
    assert (end.finish_reason, end.stop_reason) == ("stop", "STOP")


@pytest.mark.parametrize(
    ("text", "finish", "named", "reason", "complete"),
    [
        ("plain", "stop", False, "stop", []),
        ("plain", "length", False, "length", []),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "stop", False, "tool_calls", [True]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "stop", True, "stop", [True]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', "length", False, "length", [False]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', "length", True, "length", [False]),
    ],
)
def test_finish_reasons(tokenizer, text, finish, named, reason, complete):
    made = decoder(tokenizer, tools=True, named=named)
    _, end = run(made, tokenizer.encode(text, add_special_tokens=False), [5], Finished(finish))
    assert end.finish_reason == reason
    assert [call.complete for call in made.state.calls] == complete
    for call in made.state.calls:
        if call.complete:
            assert json.loads("".join(call.arguments)) == {}
