"""Random walks through a grammar: token sequences to measure along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from cli.grammar_bench.calls import offered
from cli.grammar_bench.report import Batch, Call, CallsReport, judged, schemas_of
from gateway.choices import ChoiceState
from grammar.compiler import CompiledGrammar, GrammarCompiler, allocate_bitmask
from grammar.formats.registry import format_named
from grammar.formats.tags import Schemas
from grammar.limits import DEFAULT_LIMITS
from grammar.tools import Tool, ToolChoice

_LIKED = ('"', '"}', '",', '"]', "}", "}}", "]", "\n", "</", "1", "a", " ")


def random_calls(
    tokenizer_json: Path, compiled: CompiledGrammar, vocab_size: int, stops: Sequence[int], *, count: int, most: int = 400
) -> list[list[int]]:
    """`count` sequences that the grammar allows, of at most `most` tokens, with a liking for what brings a call to its end."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    walker = _Walker(tokenizer, vocab_size, stops)
    return [walker.walk(compiled, Random(seed), most) for seed in range(count)]


def walked_calls(
    tokenizer_json: Path,
    compiler: GrammarCompiler,
    vocab_size: int,
    stops: Sequence[int],
    tools: Sequence[Tool],
    count: int,
) -> CallsReport:
    """Until `count` calls were finished: a few tools are offered, and tokens are drawn from what their grammar allows."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    walker = _Walker(tokenizer, vocab_size, stops)
    form = format_named("hermes")
    choice = ToolChoice("required")
    report = CallsReport("random tokens", float("inf"), len(tools))
    number = 0
    while report.finished < count:
        few = offered(tools, number)
        schemas = Schemas(DEFAULT_LIMITS)
        source = form.structural_tag(few, choice, schemas=schemas)
        if source is None:
            raise ValueError("there are no tools to call")
        compiled = compiler.compile(source)
        warned = {one.tool for one in schemas.unenforced()}
        parameters = schemas_of(few)
        calls: list[Call] = []
        for seed in range(4):
            ids = walker.walk(compiled, Random(f"{number} {seed}"), 400)
            state = ChoiceState(0)
            parser = form.parser(few, choice, form.new_call_id)
            text = tokenizer.decode([token for token in ids if token not in stops], skip_special_tokens=False)
            state.add([*parser.feed(text), *parser.finish()])
            for call in state.calls:
                arguments = "".join(call.arguments)
                if call.complete:
                    calls.append(judged(call.name, arguments, parameters[call.name], warned=call.name in warned))
                else:
                    calls.append(Call(call.name, arguments, "cut"))
        report.add(Batch(form.name, number, report.model, report.temperature, tuple(calls)))
        number += 1
    return report


class _Walker:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stops: Sequence[int]) -> None:
        self._liked = sorted({token for text in _LIKED for token in tokenizer.encode(text, add_special_tokens=False).ids})
        self._stops = tuple(stops)
        self._mask = allocate_bitmask(1, vocab_size)
        self._width = vocab_size

    def walk(self, compiled: CompiledGrammar, random: Random, most: int) -> list[int]:
        matcher = compiled.matcher()
        ids: list[int] = []
        while len(ids) < most and not matcher.is_terminated():
            matcher.fill_bitmask(self._mask, 0)
            bits = np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")[: self._width]
            some = [token for token in self._liked if bits[token]]
            ends = [token for token in self._stops if bits[token]]
            hurry = random.random() < 0.2 + len(ids) / most
            wanted = (ends or some) if hurry else []
            token = random.choice(wanted) if wanted else int(random.choice(np.nonzero(bits)[0]))
            matcher.accept(token)
            ids.append(token)
        return ids
