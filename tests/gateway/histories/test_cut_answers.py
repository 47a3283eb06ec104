"""Answers that a limit ended: words are words to their end, and need not be looked at."""

import msgspec
import pytest
from agents import Agent, prompt_ids, said, user

from gateway.choices import ChoiceState
from gateway.histories.keeper import _answer
from gateway.histories.pending import pending_from


def state(text, **changes):
    return ChoiceState(0, text=[text], finish_reason="length", **changes)


@pytest.mark.parametrize(
    ("text", "plain", "cut"),
    [
        ("a few wor", True, False),
        ("a few wor", False, True),  # the rest of a call may have been held back
        ("<think>\nhm", True, True),  # a template may look for the end of it
    ],
)
def test_which_answers_count_as_cut(text, plain, cut):
    answer = _answer(state(text, token_ids=[5, 6, 7], plain=plain))
    assert (answer.cut, answer.ids, answer.message["content"]) == (cut, [5, 6, 7], text)


def test_one_that_ended_by_itself_is_none():
    assert _answer(ChoiceState(0, text=["done"], finish_reason="stop", token_ids=[5])).cut is False


def test_plain_words_are_spliced_without_being_decoded(family_model, monkeypatch):
    agent = Agent(family_model("smollm2"), check_every=0)
    agent.send(user("hi"))
    ids = agent.odd_ids("a few wor")
    pending = pending_from(agent.branches[0], [_answer(state("a few wor", token_ids=ids, plain=True))])
    agent.branches[0] = msgspec.structs.replace(agent.branches[0], pending=pending)
    monkeypatch.setattr(type(agent.model.tokenizer), "decode", lambda *_: pytest.fail("it was decoded"))
    made = agent.send(user("hi"), said("a few wor"), user("go on"))
    assert made.spliced_tokens == len(ids)
    assert "".join(map(chr, prompt_ids(made))).find("".join(map(chr, ids))) > 0
