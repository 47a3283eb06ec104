"""Where a generation stands in its grammar: masks, forks, refusals and ends."""

from random import Random

import numpy as np
from hermes_walking import HERMES, LOGITS, STOPS, closed
from tokenizers import Tokenizer

from grammar.compiler import GrammarCompiler, allocate_bitmask
from grammar.tools import Tool, ToolChoice

TOOLS = (
    Tool("get", parameters=closed(city={"type": "string"})),
    Tool("ping"),
    Tool("put", parameters=closed(n={"type": "integer"})),
)


def test_special_tokens_are_never_part_of_a_string(compiler, walker):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("named", name="get")))
    matcher = compiled.matcher()
    for token_id in walker.tokenizer.encode('<tool_call>\n{"name": "get", "arguments": {"city": "').ids:
        assert matcher.accept(token_id)
    special = {token_id for token_id, token in walker.tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not special & set(walker.allowed(matcher))
    assert not any(matcher.accept(token_id) for token_id in special)
    assert matcher.accept(walker.tokenizer.encode("Rome").ids[0])


def test_a_fork_goes_its_own_way(compiler, walker):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("named", name="put")))
    trunk = compiled.matcher()
    for token_id in walker.tokenizer.encode('<tool_call>\n{"name": "put", "arguments": {"n": ').ids:
        assert trunk.accept(token_id)
    forks = [trunk.fork() for _ in range(3)]
    before = walker.allowed(trunk)
    texts = [walker.walk(fork, Random(seed)) for seed, fork in enumerate(forks)]
    assert walker.allowed(trunk) == before
    assert not trunk.is_terminated()
    assert all(fork.is_terminated() and fork.is_completed() for fork in forks)
    for text in texts:
        assert text.endswith("}}\n</tool_call>")
        int(text.removesuffix("}}\n</tool_call>"))


def test_a_refused_token_leaves_the_state(compiler, walker):
    matcher = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("required"))).matcher()
    before = walker.allowed(matcher)
    assert not matcher.accept(walker.tokenizer.encode("Hello").ids[0])
    assert not matcher.accept(STOPS[0])
    assert walker.allowed(matcher) == before
    assert not matcher.is_completed()


def test_a_mask_row_leaves_the_others_alone(compiler):
    mask = allocate_bitmask(3, LOGITS)
    assert mask.shape == (3, LOGITS // 32)
    compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("required"))).matcher().fill_bitmask(mask, 1)
    assert (mask[0] == -1).all()
    assert (mask[2] == -1).all()
    assert not (mask[1] == -1).any()


def test_stop_tokens_of_any_bit_are_allowed_at_the_end(tokenizer_json):
    stops = (31, 0, 63)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, stops)
    matcher = compiler.compile('{"type":"structural_tag","format":{"type":"const_string","value":"a"}}').matcher()
    mask = allocate_bitmask(1, LOGITS)
    assert matcher.accept(Tokenizer.from_file(str(tokenizer_json)).encode("a").ids[0])
    for _ in range(2):
        matcher.fill_bitmask(mask, 0)
        bits = np.nonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))[0]
        assert bits.tolist() == [0, 31, 63]
        matcher.accept(31)
    assert matcher.is_terminated()
