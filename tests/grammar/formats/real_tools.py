"""The tool lists of real MCP servers, and random calls of them in every format."""

import itertools
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from grammar.checking.validate import violations
from grammar.compiler import GrammarCompiler, allocate_bitmask
from grammar.deltas import ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.formats.registry import format_named
from grammar.formats.tags import Schemas
from grammar.limits import DEFAULT_LIMITS
from grammar.tools import Tool, ToolChoice

STOPS = (2, 0)
LOGITS = 49_216
_ROOT = Path(__file__).resolve().parents[3]
NOTHING = {"type": "object", "additionalProperties": False}


def real_servers():
    """Server, or file of one hard tool -> its tools. Skips the test where the data is not there."""
    for base in (_ROOT, _ROOT.parent):
        folder = base / "shared" / "data" / "tool_schemas"
        if folder.is_dir():
            break
    else:
        pytest.skip("there are no schemas of real tools at shared/data/tool_schemas, in the checkout or beside it")
    servers = {}
    for path in sorted([*(folder / "mcp").glob("*.json"), *(folder / "nasty").glob("*.json")]):
        value = json.loads(path.read_text())
        listed = value.get("tools", [value]) if isinstance(value, dict) else value
        servers[path.stem] = [Tool(tool["name"], tool.get("description"), tool.get("inputSchema")) for tool in listed]
    return servers


ENDINGS = ('"', "}", "]", ")", ", ", '", ', "}\n", "0", "</arg_value>", "\n</parameter>\n", "a", "\n", " ", ":", "2026")
"""What brings a call to its end, or is asked for by patterns and formats."""


class QuickWalker:
    """Random walks that write whole endings where the grammar allows them, so that most calls come to an end."""

    def __init__(self, tokenizer):
        self._endings = [tokenizer.encode(text, add_special_tokens=False).ids for text in ENDINGS]
        self._mask = allocate_bitmask(1, LOGITS)

    def walk(self, matcher, random, most):
        """(ids, whether it came to an end)."""
        ids = []
        while len(ids) < most and not matcher.is_terminated():
            if matcher.is_completed() and random.random() < 0.7:
                matcher.accept(STOPS[0])
                break
            if random.random() > 0.15 + len(ids) / most or not self._end(matcher, random, ids):
                matcher.fill_bitmask(self._mask, 0)
                bits = np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")
                allowed = np.nonzero(bits)[0]
                token = int(allowed[random.randrange(len(allowed))])
                assert matcher.accept(token)
                ids.append(token)
        return ids, matcher.is_terminated()

    def _end(self, matcher, random, ids):
        for ending in random.sample(self._endings, len(self._endings)):
            taken = 0
            while taken < len(ending) and matcher.accept(ending[taken]):
                taken += 1
            if taken == len(ending):
                ids += ending
                return True
            matcher.rollback(taken)
        return False


class FormatSetting:
    """One format with a compiler for SmolLM2's vocabulary, in which its markers are text."""

    def __init__(self, name, directory):
        self.format = format_named(name)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.compiler = GrammarCompiler(directory / "tokenizer.json", LOGITS, STOPS)
        self.walker = QuickWalker(self.tokenizer)

    def accepted(self, tools, choice=ToolChoice("required")):
        """The compiled grammar of a list, and the tools whose caller is warned. Raises GrammarRefused."""
        schemas = Schemas(DEFAULT_LIMITS)
        compiled = self.compiler.compile(self.format.structural_tag(tools, choice, schemas=schemas))
        return compiled, {one.tool for one in schemas.unenforced()}

    def walked(self, tools, seeds, choice=ToolChoice("required", parallel=False), most=300):
        """(calls that came to an end, calls that violate their schema though nobody is warned of it)."""
        compiled, warned = self.accepted(tools, choice)
        schemas = {tool.name: tool.parameters or NOTHING for tool in tools}
        finished, wrong = 0, []
        for seed in seeds:
            ids, ended = self.walker.walk(compiled.matcher(), Random(seed), most=most)
            if not ended:
                continue
            text = self.tokenizer.decode([token for token in ids if token not in STOPS], skip_special_tokens=False)
            calls = list(complete_calls(self.format, tools, choice, text))
            assert calls, text
            for name, arguments in calls:
                finished += 1
                found = violations(schemas[name], arguments)
                if found and name not in warned:
                    wrong.append((name, arguments, found))
        return finished, wrong

    def close(self):
        self.compiler.close()


def complete_calls(form, tools, choice, text):
    numbers = itertools.count()
    parser = form.parser(tools, choice, lambda: f"c{next(numbers)}")
    name, arguments = "", ""
    for delta in [*parser.feed(text), *parser.finish()]:
        if isinstance(delta, ToolCallStart):
            name, arguments = delta.name, ""
        elif isinstance(delta, ToolCallArguments):
            arguments += delta.text
        elif isinstance(delta, ToolCallEnd):
            assert delta.complete, text
            yield name, arguments
