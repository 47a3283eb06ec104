"""Tools of real MCP servers in every format: their lists are accepted, and random calls are valid or were warned of.

Every format takes a part of every server's list, chosen by a hash, so that together they take all of it; and one whole list.
`make grammars` (full_size.py) takes all lists whole in every format, and every tool alone.
"""

import hashlib
from random import Random

import pytest
from real_tools import FormatSetting, real_servers

from grammar.formats.registry import FORMAT_NAMES
from grammar.tools import ToolChoice

PARTS = 6


@pytest.fixture(scope="module", params=FORMAT_NAMES)
def setting(request, smollm2_dir):
    made = FormatSetting(request.param, smollm2_dir)
    yield made
    made.close()


def part_of(tool, name):
    digest = hashlib.sha256(tool.name.encode()).digest()
    return (digest[0] + FORMAT_NAMES.index(name)) % PARTS


def test_a_part_of_every_list_is_accepted_and_its_random_calls_are_valid(setting):
    servers = real_servers()
    assert sum(map(len, servers.values())) > 300
    finished, wrong, taken = 0, [], 0
    for server, tools in servers.items():
        tools = [tool for tool in tools if part_of(tool, setting.format.name) == 0]
        if tools:
            taken += len(tools)
            count, bad = setting.walked(tools, [f"{server} {seed}" for seed in range(2)])
            finished += count
            wrong += bad
    assert wrong == []
    assert taken > 30
    assert finished > 10


def test_a_whole_list_is_accepted(setting):
    servers = {name: tools for name, tools in real_servers().items() if len(tools) > 5}
    whole = Random(setting.format.name).choice(sorted(servers))
    for choice in (ToolChoice("auto"), ToolChoice("required")):
        compiled, _ = setting.accepted(servers[whole], choice)
        assert compiled.memory_bytes > 0
