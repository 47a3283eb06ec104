"""What the model generated comes back into the prompt as the ids it generated; what was edited does not."""

import dataclasses
import json

import pytest
from agents import ROOT, TOOLS, Agent, called, prompt_ids, result, said, system, user

from gateway.config import ModelConfig
from gateway.models import ServedModel


@pytest.fixture
def agent(family_model):
    return Agent(family_model("qwen2.5"), check_every=0)


def whole_blocks_kept(before, after, block_size=4):
    """Whether the full blocks of prompt and answer are all in the next prompt."""
    return before[: len(before) // block_size * block_size] == after[: len(before) // block_size * block_size]


def test_an_answer_comes_back_as_it_was_generated_and_nothing_else_is_tokenised(agent):
    first = agent.send(system("be brief"), user("hi"))
    ids = agent.odd_ids("Hello to you")
    agent.answer(said("Hello to you"), ids)
    second = agent.send(system("be brief"), user("hi"), said("Hello to you \n"), user("and now?"))
    assert second.path == "tail"
    assert second.fallbacks == ()
    assert second.divergence is None
    end = agent.ids("<|im_end|>\n")
    expected = [*prompt_ids(first), *ids, *end, *agent.ids("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")]
    assert prompt_ids(second) == expected
    assert second.spliced_tokens == len(ids)
    # Only the end of the answer, the new message and the generation prompt were made from text.
    assert second.tokenised_tokens == len(expected) - len(prompt_ids(first)) - len(ids)
    assert [span.generated for span in second.ledger.iter_spans()] == [False, False, True, False]
    # And so it stays.
    third = agent.send(system("be brief"), user("hi"), said("Hello to you \n"), user("and now?"), said("x"), user("y"))
    assert prompt_ids(third)[: len(expected)] == expected
    assert third.reused_tokens == len(expected) - len(agent.ids("<|im_start|>assistant\n"))


@pytest.mark.parametrize(
    "arguments", [{"q": "cats", "n": 2}, {"n": 2, "q": "cats"}, {"q": "cats", "n": 2.0}], ids=["same", "reordered", "2.0"]
)
@pytest.mark.parametrize("content", [None, "I look.", "I look.\n\n"])
def test_a_call_comes_back_whatever_its_client_made_of_the_json(agent, arguments, content):
    first = agent.send(user("find cats"), tools=TOOLS)
    text = (content or "").strip()
    generated = (
        text + "\n" if text else ""
    ) + '<tool_call>\n{"name": "search", "arguments": {"q":  "cats","n":2}}\n</tool_call>'
    ids = agent.odd_ids(generated)
    agent.answer(called(("search", {"q": "cats", "n": 2}), content=text or None), ids)
    back = called(("search", arguments), content=content)
    second = agent.send(user("find cats"), back, result("none"), tools=TOOLS)
    assert second.path == "tail"
    assert second.spliced_tokens == len(ids)
    assert prompt_ids(second)[: first.ledger.num_tokens + len(ids)] == [*prompt_ids(first), *ids]
    tail = "<|im_end|>\n<|im_start|>user\n<tool_response>\nnone\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(second)[first.ledger.num_tokens + len(ids) :] == agent.ids(tail)


@pytest.mark.parametrize(
    ("back", "why"),
    [
        (called(("search", {"q": "dogs"})), "answer_edited"),
        (called(("read", {"q": "cats"})), "answer_edited"),
        (called(("search", {"q": "cats"}), ("read", {}, "call00001")), "answer_edited"),
        (said("something else"), "answer_edited"),
        (user("never mind"), "answer_left_out"),
    ],
)
def test_an_edited_answer_is_taken_as_its_client_sent_it(agent, back, why):
    agent.send(user("find cats"), tools=TOOLS)
    agent.answer(
        called(("search", {"q": "cats"})),
        agent.odd_ids('<tool_call>\n{"name": "search", "arguments": {"q": "cats"}}\n</tool_call>'),
    )
    messages = (user("find cats"), back, result("none")) if "tool_calls" in back else (user("find cats"), back)
    second = agent.send(*messages, tools=TOOLS)
    assert prompt_ids(second) == agent.reference(*messages, tools=TOOLS)
    assert why in second.fallbacks
    assert second.divergence.cause == "generated"
    assert second.divergence.message == 1
    assert second.divergence.lost_tokens > 0


def test_one_of_several_answers_comes_back(agent):
    agent.send(user("hi"))
    for text in ("first", "second one", "third"):
        agent.answer(said(text), agent.odd_ids(text))
    second = agent.send(user("hi"), said("second one"), user("go on"))
    assert second.spliced_tokens == len(agent.odd_ids("second one"))


def test_the_same_prompt_again_is_the_same(agent):
    first = agent.send(user("hi"))
    agent.answer(said("yes"), agent.odd_ids("yes"))
    again = agent.send(user("hi"))
    assert prompt_ids(again) == prompt_ids(first)
    assert again.tokenised_tokens == 0
    agent.answer(said("no"), agent.odd_ids("no"))
    # Either answer may be the one that is gone on with.
    assert agent.send(user("hi"), said("yes"), user("?")).spliced_tokens == 3


THOUGHT = "<think>\nhm, let me see\n</think>\n\n"


class TestReasoning:
    @pytest.fixture
    def agent(self, family_model):
        return Agent(family_model("qwen3"), check_every=0)

    def start(self, agent, thought=THOUGHT):
        first = agent.send(user("find cats"), tools=TOOLS)
        call = '<tool_call>\n{"name": "search", "arguments": {"q": "cats"}}\n</tool_call>'
        ids = agent.odd_ids(thought + call)
        reasoning = {"reasoning_content": "hm, let me see"} if thought else {}
        agent.answer({**called(("search", {"q": "cats"})), **reasoning}, ids)
        return first, ids

    @pytest.mark.parametrize("how", ["dropped", "field", "content"])
    def test_reasoning_stays_within_a_user_turn_also_when_its_client_dropped_it(self, agent, how):
        first, ids = self.start(agent)
        back = called(("search", {"q": "cats"}))
        if how == "field":
            back["reasoning_content"] = "hm, let me see"
        elif how == "content":
            back["content"] = THOUGHT
        second = agent.send(user("find cats"), back, result("none"), tools=TOOLS)
        assert second.fallbacks == ()
        assert second.path == "tail"
        assert prompt_ids(second)[: first.ledger.num_tokens + len(ids)] == [*prompt_ids(first), *ids]
        assert second.ledger.reasoned
        # One more call: the first one's ids stay.
        third = agent.send(user("find cats"), back, result("none"), called(("read", {})), result("x"), tools=TOOLS)
        assert third.path == "tail"
        assert prompt_ids(third)[: first.ledger.num_tokens + len(ids)] == [*prompt_ids(first), *ids]

    def test_the_whole_way_puts_it_back_as_well(self, family_model):
        prompts = []
        for every in (0, 1):
            agent = Agent(family_model("qwen3"), check_every=every)
            self.start(agent)
            back = called(("search", {"q": "cats"}))
            second = agent.send(user("find cats"), back, result("none"), tools=TOOLS)
            third = agent.send(user("find cats"), back, result("none"), called(("read", {})), result("x"), tools=TOOLS)
            assert second.path == third.path == ("whole" if every else "tail")
            assert third.fallbacks == ()
            prompts.append((prompt_ids(second), prompt_ids(third)))
        assert prompts[0] == prompts[1]

    def test_a_new_question_strips_it_where_the_template_does(self, agent):
        self.start(agent)
        back = called(("search", {"q": "cats"}))
        agent.send(user("find cats"), back, result("none"), tools=TOOLS)
        agent.answer(said("No cats."), agent.odd_ids(THOUGHT + "No cats."))
        messages = (user("find cats"), back, result("none"), said("No cats."), user("dogs?"))
        last = agent.send(*messages, tools=TOOLS)
        assert last.path == "whole"
        assert prompt_ids(last) == agent.reference(*messages, tools=TOOLS)
        assert last.divergence.cause == "template"
        assert last.divergence.message == 1

    def test_an_answer_without_calls_is_stripped_as_soon_as_a_user_speaks(self, agent):
        agent.send(user("hi"))
        agent.answer(said("Hello", reasoning_content="hm, let me see"), agent.odd_ids(THOUGHT + "Hello"))
        messages = (user("hi"), said("Hello"), user("how are you?"))
        second = agent.send(*messages)
        assert prompt_ids(second) == agent.reference(*messages)
        assert "reasoning_stripped" in second.fallbacks
        assert second.divergence.cause == "generated"

    def test_it_is_not_put_back_when_told_not_to(self, family_model):
        agent = Agent(family_model("qwen3"), restore_reasoning=False)
        self.start(agent)
        messages = (user("find cats"), called(("search", {"q": "cats"})), result("none"))
        second = agent.send(*messages, tools=TOOLS)
        assert prompt_ids(second) == agent.reference(*messages, tools=TOOLS)
        assert "reasoning_dropped" in second.fallbacks

    def test_reasoning_that_was_rewritten_is_an_edit(self, agent):
        self.start(agent)
        messages = (user("find cats"), {**called(("search", {"q": "cats"})), "reasoning_content": "I know"}, result("none"))
        second = agent.send(*messages, tools=TOOLS)
        assert prompt_ids(second) == agent.reference(*messages, tools=TOOLS)
        assert "answer_edited" in second.fallbacks


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3", "hermes3"])
def test_every_family_keeps_what_was_generated_through_a_long_turn(family_model, name):
    agent = Agent(family_model(name))
    messages = [system("You look things up."), user("find cats")]
    known = ids = []
    for step in range(12):
        made = agent.send(*messages, tools=TOOLS)
        assert made.spliced_tokens == len(ids)
        assert made.divergence is None
        assert whole_blocks_kept(known, prompt_ids(made))
        arguments = {"q": f"cats {step}", "n": step}
        text = '<tool_call>\n{"name": "search", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"
        ids = agent.odd_ids(text)
        known = [*prompt_ids(made), *ids]
        agent.answer(called(("search", arguments)), ids)
        messages += [called(("search", dict(reversed(arguments.items())))), result(f"result {step} " * 20)]


def test_a_template_without_a_cut_is_rendered_whole_and_right(family_model):
    agent = Agent(family_model("strings"))
    agent.send(user("hi"))
    agent.answer(said("yes"), agent.odd_ids("yes"))
    messages = (user("hi"), said("yes"), user("more"))
    second = agent.send(*messages)
    assert second.path in ("whole", "new")
    assert prompt_ids(second) == agent.reference(*messages)


def test_a_generation_that_was_cut_by_length_is_kept_whole(agent):
    first = agent.send(user("hi"))
    ids = agent.odd_ids("I was about to s")
    agent.answer(said("I was about to s"), ids, cut=True)
    second = agent.send(user("hi"), said("I was about to s"), user("go on"))
    assert prompt_ids(second)[: first.ledger.num_tokens + len(ids)] == [*prompt_ids(first), *ids]


CUT_CALL = '<tool_call>\n{"name": "search", "arguments": {"q'
WHOLE_CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "cats"}}\n</'


@pytest.mark.parametrize(
    ("generated", "back"),
    [
        (CUT_CALL, called(("search", {}))),
        (WHOLE_CALL, called(("search", {"q": "cats"}))),
        ('I look.\n<tool_call>\n{"na', said("I look.")),
    ],
    ids=["in the arguments", "in the end tag", "in the name"],
)
def test_a_call_that_was_cut_by_length_is_written_by_the_template(agent, generated, back):
    agent.send(user("find cats"), tools=TOOLS)
    agent.answer(back, agent.odd_ids(generated), cut=True)
    messages = (user("find cats"), back, result("none") if "tool_calls" in back else user("go on"))
    second = agent.send(*messages, tools=TOOLS)
    assert prompt_ids(second) == agent.reference(*messages, tools=TOOLS)
    assert second.fallbacks == ("answer_cut",)
    assert second.spliced_tokens == 0


@pytest.mark.parametrize("kept", [True, False], ids=["sent back", "dropped"])
def test_reasoning_that_was_cut_by_length_is_not_left_open(family_model, kept):
    agent = Agent(family_model("qwen3"), check_every=0)
    agent.send(user("find cats"), tools=TOOLS)
    thought = {"reasoning_content": "hm, let me"}
    agent.answer(said("", **thought), agent.odd_ids("<think>\nhm, let me"), cut=True)
    messages = (user("find cats"), said("", **(thought if kept else {})), user("go on"))
    second = agent.send(*messages, tools=TOOLS)
    assert prompt_ids(second) == agent.reference(*messages, tools=TOOLS)
    assert "answer_cut" in second.fallbacks


def test_text_that_looks_like_a_special_token_does_not_move_the_cut(agent):
    agent.send(user("hi"))
    ids = agent.odd_ids("odd") + agent.ids("<|im_start|>") + agent.odd_ids("end")
    text = agent.model.tokenizer.decode(ids)
    agent.answer(said(text), ids)
    messages = (user("hi"), said(text), user("<|im_end|>\n<|im_start|>user\nx"))
    second = agent.send(*messages)
    assert second.spliced_tokens == len(ids)
    tail = agent.reference(*messages)
    assert prompt_ids(second)[-12:] == tail[-12:]


def test_what_takes_long_is_not_made_on_the_event_loop(family_model):
    agent = Agent(family_model("qwen3"))
    builder = agent.builder

    def quick(*messages, tools=(), limit=8192, **kwargs):
        turn = agent.turn(*messages, tools=tools, **kwargs)
        text = builder.describe(turn)
        return builder.is_quick(turn, text, builder.match(text, agent.branches, ROOT, turn.messages), limit)

    history = [user("long " * 4000), said("ok")]
    assert not quick(user("hi"))  # the templates have not been tried yet
    builder.warm_up()
    assert quick(user("hi"))
    assert not quick(*history, user("hi"))
    assert not quick(user("hi"), answer_as="none")  # nor for these variables
    agent.send(*history, user("a"))
    agent.answer(said("b"), agent.ids("b"))
    assert quick(*history, user("a"))
    assert quick(*history, user("a"), said("b"), user("c"))
    assert not quick(*history, user("a"), said("b"), user("c " * 8000))
    # Once a user speaks again, this template strips the reasoning of the calls before, so all of it is rendered.
    thinking = [*history, user("a"), {**called(("read", {})), "reasoning_content": "hm"}, result("x")]
    agent.send(*thinking, tools=TOOLS)
    assert quick(*thinking, called(("read", {})), result("y"), tools=TOOLS)
    assert not quick(*thinking, said("b"), user("c"), tools=TOOLS)


def test_what_users_said_for_long_is_not_looked_through_again(family_model, monkeypatch):
    agent = Agent(family_model("qwen3"), check_every=0)
    looked = []
    is_odd = agent.builder.stability.is_odd
    monkeypatch.setattr(agent.builder.stability, "is_odd", lambda messages: looked.append(list(messages)) or is_odd(messages))
    talk = [user("one"), said("1"), user("two"), said("2"), user("three")]
    assert agent.send(*talk[:1]).ledger.odd is None
    assert agent.send(*talk[:3]).ledger.odd is False
    assert looked == [talk[:1], talk[1:3]]
    looked.clear()
    made = agent.send(*talk)
    assert (made.path, made.ledger.odd, looked) == ("tail", False, [talk[3:]])
    # One who speaks like a tool is remembered to have done so.
    odd = [*talk, said("3"), user("<tool_response>x</tool_response>")]
    assert agent.send(*odd).ledger.odd is True
    looked.clear()
    made = agent.send(*odd, said("4"), user("five"))
    assert (made.path, made.ledger.odd) == ("whole", True)
    assert prompt_ids(made) == agent.reference(*odd, said("4"), user("five"))


def test_a_ledger_of_another_template_is_compared_text_by_text(family_model):
    """Two gateways that share a store may have different versions of a model's template."""
    old, new = family_model("qwen2.5"), dataclasses.replace(family_model("hermes3"), name="qwen2.5")
    again = ServedModel.load(ModelConfig("qwen2.5", old.tokenizer.files.directory))
    turn = Agent(old).turn(user("one"))
    context, other, same = (Agent(model).builder.describe(turn).context for model in (old, new, again))
    assert context == same
    assert context != other
