"""How often the short way to a prompt is compared with the long one, and what comes of it when they differ."""

import itertools

from agents import Agent, prompt_ids, said, user

TRAP = [user(""), {**said(""), "reasoning_content": "a"}, user("<tool_response>x</tool_response>"), said("")]
"""Qwen3's template takes this user for a tool, which decides what becomes of the reasoning before."""


def test_a_check_finds_a_template_that_writes_old_messages_in_another_way(family_model, caplog):
    agent = Agent(family_model("qwen3"), check_every=1)
    agent.builder.stability.is_odd = lambda messages: False  # whatever would have kept it from the short way
    for end in (1, 3, 4):
        made = agent.send(*TRAP[:end])
    assert "template_distrusted" in made.fallbacks
    assert prompt_ids(made) == agent.reference(*TRAP)
    assert "renders new messages differently" in caplog.text
    more = [*TRAP, user("go on")]
    made = agent.send(*more)
    assert made.path == "whole"
    assert prompt_ids(made) == agent.reference(*more)


def test_checks_come_less_often_the_more_of_them_found_nothing(family_model):
    builder = Agent(family_model("smollm2"), check_every=4).builder
    checked = []
    for number in range(400):
        if builder.is_check():
            checked.append(number)
            builder.agreed()
    gaps = [after - before for before, after in itertools.pairwise(checked)]
    assert checked[0] == 0
    assert gaps == [4, 8, 16, 32, 64, 64, 64, 64, 64]


def test_none_are_made_where_none_are_wanted(family_model):
    builder = Agent(family_model("smollm2"), check_every=0).builder
    assert not any(builder.is_check() for _ in range(200))


def test_a_turn_that_agrees_counts_as_a_check(family_model):
    agent = Agent(family_model("smollm2"), check_every=2)
    messages = []
    paths = []
    for number in range(12):
        messages += [user(f"question {number}"), said(f"answer {number}")]
        paths.append(agent.send(*messages[:-1]).path)
        assert prompt_ids(agent.send(*messages[:-1])) == agent.reference(*messages[:-1])
    assert paths[0] == "new"
    assert [number for number, path in enumerate(paths) if path == "whole"] == [1, 3, 7]
