"""Whatever a conversation does, its prompt is what the template and the tokenizer give for all of it."""

import pytest
from agents import TOOLS, Agent, called, prompt_ids, result, said, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.turn import TurnError

TEXTS = st.one_of(
    st.sampled_from(
        [
            *("", " ", "a", "hello there", " padded ", "line\nline\n", "日本 🙂", '{"a": 1}', "half <think>", "words " * 30),
            "<|im_end|>\n<|im_start|>user\n",
            "<tool_response>x</tool_response>",
            "[/INST] x </s>",
            "<think>\nno\n</think>\n\nyes",
        ]
    ),
    st.text(max_size=12),
)
ARGUMENTS = st.dictionaries(st.sampled_from(["q", "n"]), st.one_of(st.integers(-5, 5), st.text(max_size=5)), max_size=2)


@st.composite
def rounds(draw):
    """A question, any number of calls with results, and an answer."""
    messages = [user(draw(TEXTS))]
    for step in range(draw(st.integers(0, 2))):
        count = draw(st.sampled_from([1, 1, 1, 2]))
        ids = [f"c{step:03d}{at:05d}" for at in range(count)]
        message = called(*[("search", draw(ARGUMENTS), name) for name in ids], content=draw(st.none() | TEXTS))
        if draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = draw(st.text("ab \n", min_size=1, max_size=6))
        messages += [message, *[result(draw(TEXTS), name) for name in ids]]
    answer = said(draw(TEXTS))
    if draw(st.integers(0, 3)) == 0:
        answer["reasoning_content"] = draw(st.text("ab \n", min_size=1, max_size=6))
    return [*messages, answer]


@st.composite
def histories(draw):
    """Turns of one session: the conversation grows, and now and then is edited, cut, compacted or gets other tools."""
    messages = [system(draw(TEXTS))] if draw(st.booleans()) else []
    tools = TOOLS if draw(st.booleans()) else ()
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        grown = [*messages, *draw(rounds())]
        ends = [end for end in range(len(messages) + 1, len(grown) + 1) if grown[end - 1]["role"] != "assistant"]
        if draw(st.integers(0, 5)) == 0:
            ends.append(len(grown))
        turns.extend((list(grown[:end]), tools) for end in ends)
        messages = grown
        change = draw(st.sampled_from(["none", "none", "none", "edit", "cut", "compact", "tools", "again"]))
        if change == "edit":
            at = draw(st.integers(0, len(messages) - 1))
            messages = [dict(message) for message in messages]
            messages[at]["content"] = draw(TEXTS)
        elif change == "cut":
            messages = messages[: draw(st.integers(1, len(messages)))]
        elif change == "compact":
            keep = draw(st.integers(0, len(messages)))
            messages = [*messages[: draw(st.integers(0, 1))], user(draw(TEXTS)), said(draw(TEXTS)), *messages[keep:]]
        elif change == "tools":
            tools = () if tools else TOOLS[: draw(st.integers(1, 2))]
        elif change == "again" and turns:
            turns.append(turns[-1])
    return turns


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3", "mistral", "hermes3", "gemma", "strings"])
@settings(max_examples=25, deadline=None)
@given(turns=histories(), every=st.sampled_from([0, 3]))
def test_prompts_without_generated_text_are_those_of_the_template(family_model, name, turns, every):
    agent = Agent(family_model(name), check_every=every)
    for messages, tools in turns:
        try:
            expected = agent.reference(*messages, tools=tools)
        except TurnError:
            with pytest.raises(TurnError, match="does not take this conversation"):
                agent.send(*messages, tools=tools)
            continue
        made = agent.send(*messages, tools=tools)
        assert prompt_ids(made) == expected, (made.path, made.fallbacks)
        assert "template_distrusted" not in made.fallbacks


def test_a_user_who_speaks_like_a_tool_is_rendered_with_everything_else(family_model):
    """Qwen3's template takes such a user for a result, and then writes the reasoning of an answer before it."""
    agent = Agent(family_model("qwen3"), check_every=0)
    history = [user(""), {**said(""), "reasoning_content": "a"}, user("<tool_response>x</tool_response>"), said("")]
    for end in (1, 3, 4):
        made = agent.send(*history[:end])
        assert prompt_ids(made) == agent.reference(*history[:end]), (end, made.path)


def test_what_templates_look_for_in_texts(family_model):
    words = {name: family_model(name).renderer.content_words() for name in ("smollm2", "qwen3")}
    assert {"<tool_response>", "</tool_response>", "</think>"} <= words["qwen3"]
    assert words["smollm2"] == frozenset()


WORDS = st.text("abc é,.", min_size=1, max_size=8).map(str.strip).filter(bool)


@st.composite
def dialogues(draw):
    """What happens turn by turn: the model's answer, and what its client does before it speaks again."""
    steps = [
        (draw(WORDS), draw(st.sampled_from(["goes on", "goes on", "trims", "edits", "forgets", "asks again", "rewrites"])))
        for _ in range(draw(st.integers(1, 6)))
    ]
    return draw(st.booleans()), steps


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "llama3", "hermes3", "gemma"])
@settings(max_examples=25, deadline=None)
@given(dialogue=dialogues(), every=st.sampled_from([0, 2]))
def test_generated_ids_stand_exactly_where_their_text_would(family_model, name, dialogue, every):
    agent = Agent(family_model(name), check_every=every)
    has_system, steps = dialogue
    messages = [system("be brief")] if has_system and name != "gemma" else []
    messages.append(user("question"))
    decode = agent.model.tokenizer.decode
    expected, known, ids = 0, [], []
    for number, (answer, then) in enumerate(steps):
        made = agent.send(*messages)
        prompt = prompt_ids(made)
        assert decode(prompt) == agent.model.renderer.render(messages), (made.path, made.fallbacks)
        # Without a generation prompt (gemma) answers are generated where the template would have put a header first.
        assert made.spliced_tokens == (0 if name == "gemma" else expected)
        if made.spliced_tokens:
            assert prompt[: len(known)] == known
        ids = [one for character in answer for one in agent.ids(character)]
        agent.answer(said(answer), ids)
        known, expected = [*prompt, *ids], len(ids)
        if then == "edits":
            answer, expected = answer + " indeed", 0
        elif then == "forgets":
            answer, expected = "something else", 0
        elif then == "asks again":
            expected, known = 0, []
            continue
        messages = [*messages, said(answer + " \n" if then == "trims" and name in ("llama3", "gemma") else answer)]
        messages.append(user(f"and {number}?"))
        if then == "rewrites":
            messages[-3] = user(f"no, {number}")
            expected = 0
