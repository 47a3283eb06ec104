"""What tests of Hermes grammars share: random walks through token masks, and what came of them."""

import itertools
import json

import jsonschema
import numpy as np

from grammar.compiler import allocate_bitmask
from grammar.deltas import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.formats.hermes import HermesFormat
from grammar.tools import Tool

HERMES = HermesFormat()
STOPS = (2, 0)
LOGITS = 49_216
"""A little wider than the vocabulary, as padded heads are."""


class Walker:
    """Generates by chance what a grammar allows, with a liking for tokens that bring the text to its end."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        quotes = ('"', '"}', '"]', '"}}', '",')
        closing = ("}", "]", "}}", "\n", "</")
        self.quotes = {token_id for token in quotes for token_id in tokenizer.encode(token).ids}
        helpful = ("0", "1", "9", ":", "/", ".", "-", "a", "A", "x")  # what patterns and formats ask for
        self.helpful = {token_id for token in helpful for token_id in tokenizer.encode(token).ids}
        self.closing = {token_id for token in closing for token_id in tokenizer.encode(token).ids} | set(STOPS)
        self.mask = allocate_bitmask(1, LOGITS)

    def allowed(self, matcher):
        matcher.fill_bitmask(self.mask, 0)
        return np.nonzero(np.unpackbits(self.mask.numpy().view(np.uint8), bitorder="little"))[0].tolist()

    def choose(self, allowed, random, hurry):
        for kind, chance in ((self.quotes, hurry), (self.helpful, 0.3), (self.closing, hurry)):
            liked = [token_id for token_id in allowed if token_id in kind]
            if liked and random.random() < chance:
                return random.choice(liked)
        return random.choice(allowed)

    def walk(self, matcher, random, prompt=(), most=2_000):
        """The text of a whole generation that begins with the tokens `prompt`."""
        ids = list(prompt)
        for token_id in ids:
            assert matcher.accept(token_id)
        while len(ids) < most:
            allowed = self.allowed(matcher)
            assert allowed, f"a dead end after {self.tokenizer.decode(ids)!r}"
            assert allowed[-1] < LOGITS
            token_id = self.choose(allowed, random, min(0.4 + len(ids) / 400, 0.85))
            assert matcher.accept(token_id)
            if token_id in STOPS:
                assert matcher.is_terminated()
                assert self.allowed(matcher) == sorted(STOPS)
                assert not matcher.accept(token_id)
                return self.tokenizer.decode(ids)
            ids.append(token_id)
        raise AssertionError(f"no end after {most} tokens: {self.tokenizer.decode(ids)[:300]!r}")


def parsed(tools, choice, text):
    """(text, [(name, arguments)]) of a generation; every call is complete."""
    numbers = itertools.count()
    parser = HERMES.parser(tools, choice, lambda: f"c{next(numbers)}")
    calls, said = [], ""
    for delta in [*parser.feed(text), *parser.finish()]:
        if isinstance(delta, ToolCallStart):
            calls.append([delta.name, ""])
        elif isinstance(delta, ToolCallArguments):
            calls[-1][1] += delta.text
        elif isinstance(delta, ToolCallEnd):
            assert delta.complete
        else:
            assert isinstance(delta, TextDelta)
            said += delta.text
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def accepts(compiled, tokenizer, text):
    """Whether the text may be generated to its end."""
    matcher = compiled.matcher()
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text).ids) and matcher.accept(STOPS[0])


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def draft_2020(schema):
    """Older spellings that jsonschema does not read, as the drafts of their time mean them."""
    if isinstance(schema, list):
        return [draft_2020(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: draft_2020(child) for key, child in schema.items()}
    if isinstance(out.get("exclusiveMinimum"), bool):
        out["exclusiveMinimum"] = out.pop("minimum")
    if out.pop("nullable", False) is True:
        out = {"anyOf": [out, {"type": "null"}]}
    return out


def check(schema, arguments):
    jsonschema.Draft202012Validator(draft_2020(schema or closed())).validate(arguments)


def source_for(i):
    return HERMES.structural_tag([Tool(f"tool{i}", parameters=closed(a={"type": "integer"}))])
