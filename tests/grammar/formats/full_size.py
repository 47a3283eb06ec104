"""`make grammars`: every tool of the real MCP servers alone and every whole list of theirs, in every format. It takes
minutes, so it is no part of the suite (its name says so); test_real_tools.py is the same in small."""

import functools

import pytest
from real_tools import FormatSetting, real_servers

from grammar.formats.registry import FORMAT_NAMES
from grammar.tools import ToolChoice

say = functools.partial(print, flush=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_tool_and_every_list(smollm2_dir, name):
    setting = FormatSetting(name, smollm2_dir)
    finished, wrong, alone = 0, [], 0
    seen = set()
    try:
        for server, tools in real_servers().items():
            setting.accepted(tools, ToolChoice("auto"))
            for tool in tools:
                if repr(tool) not in seen:
                    seen.add(repr(tool))
                    setting.accepted([tool], ToolChoice("auto"))
                    count, bad = setting.walked([tool], [f"{tool.name} {seed}" for seed in range(2)])
                    alone += bool(count)
                    finished, wrong = finished + count, wrong + bad
            count, bad = setting.walked(tools, [f"{server} {seed}" for seed in range(20)])
            finished, wrong = finished + count, wrong + bad
    finally:
        setting.close()
    say(f"{name}: {len(seen)} tools, {alone} of them called alone, {finished} calls finished, {len(wrong)} wrong")
    assert wrong == []
    assert alone > len(seen) * 0.8
